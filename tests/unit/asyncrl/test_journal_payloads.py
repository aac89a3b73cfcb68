"""Groups in the journal: kept as they travelled, small, copied out of the log beside the writing, forgotten in time."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import asyncrl.journal.data_files
import asyncrl.journal.integrity
import asyncrl.journal.writer
from asyncrl.errors import BadStateError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.data_files import data_file_paths, pack_frames, unpack_group
from asyncrl.journal.writer import Journal
from protocol.codec import encode
from protocol.messages import Group
from tests.rigs.journal_groups import issue, issue_and_add, make_group, slots_of, take, wait_for_copy
from tests.rigs.waiting import wait_until

PER_STEP = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL_FILE


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with closing(Journal(path)) as opened:
        yield opened


def assert_same(one: Group, other: Group) -> None:
    """Equal in every byte that would travel."""
    assert list(map(bytes, encode(one))) == list(map(bytes, encode(other)))


def wait_until_gone(*files: Path) -> None:
    wait_until(lambda: not any(file.exists() for file in files), "files to be deleted")


def train(journal: Journal, *steps: int) -> int:
    """Write and take two groups a step. Returns the bytes of one."""
    for step in steps:
        groups = [make_group(PER_STEP * step + n, versions=3) for n in range(PER_STEP)]
        issue_and_add(journal, *groups)
        take(journal, step, slots_of(groups))
    return journal.payload_bytes // (PER_STEP * len(steps))


# --- one group --------------------------------------------------------------------------------------


def test_a_group_comes_back_as_it_was_and_columns_of_one_value_take_no_room() -> None:
    constant = make_group(1, versions=3)
    versions = constant.versions.copy()
    versions[500] = 2
    almost = constant.model_copy(update={"versions": versions})
    for group in (make_group(1), make_group(3, length=2), almost, constant):
        packed = pack_frames(encode(group))
        assert_same(unpack_group(b"".join(packed)), group)
    needed = constant.token_ids.nbytes + constant.logprobs.nbytes
    assert needed < sum(map(len, packed)) < needed + 2000


# --- the log ----------------------------------------------------------------------------------------


def test_the_log_is_copied_beside_the_writing(
    tmp_path: Path, path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a process that is killed meanwhile leaves is whole."""
    monkeypatch.setattr(asyncrl.journal.writer, "LOG_BYTES", 1 << 16)
    size_before = path.stat().st_size
    for n in range(30):
        issue_and_add(journal, make_group(n, length=10_000))
    wait_until(lambda: path.stat().st_size > size_before, "a copy of the log")
    killed = tmp_path / "killed"
    killed.mkdir()
    wait_for_copy(journal)
    for file in tmp_path.glob(f"{JOURNAL_FILE}*"):
        shutil.copy(file, killed / file.name)
    journal.flush()
    assert path.with_name(f"{JOURNAL_FILE}-wal").stat().st_size == 0
    for whole in (journal, Journal(killed / JOURNAL_FILE)):
        assert [slot.ticket_id for slot in whole.state().buffered] == list(range(30))
        assert_same(whole.group(29), make_group(29, length=10_000))
        whole.close()


def test_a_log_that_cannot_be_copied_stops_the_next_transaction(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(asyncrl.journal.writer, "LOG_BYTES", 1 << 12)
    with monkeypatch.context() as broken:
        broken.setattr(sqlite3, "connect", fail)
        issue(journal, slots_of([make_group(0)]))
        wait_for_copy(journal)
    with pytest.raises(BadStateError, match="disk I/O error"):
        issue_and_add(journal, make_group(1))


# --- groups that a checkpoint holds -----------------------------------------------------------------


def test_a_segment_stays_until_its_last_group_is_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncrl.journal.data_files, "DATA_FILE_BYTES", 400_000)  # two groups
    groups = [make_group(n, length=10_000) for n in range(6)]
    with closing(Journal(path)) as journal:
        for group in groups:
            issue_and_add(journal, group)
        files = list(data_file_paths(path).values())
        assert len(files) == 3
        take(journal, 1, slots_of(groups[:3]))
        take(journal, 2, slots_of(groups[4:]))
        journal.forget_payloads(1)
        wait_until_gone(*files[:1])
        assert_same(journal.group(3), groups[3])
        journal.forget_payloads(2)
        wait_until_gone(*files[2:])
        assert_same(journal.group(3), groups[3])
        issue_and_add(journal, make_group(9))
        assert_same(journal.group(9), make_group(9))


def test_a_file_is_deleted_only_after_the_log_that_forgets_it_is_on_the_disk(path: Path) -> None:
    """Otherwise a power cut could leave a row without its group."""
    with closing(Journal(path)) as journal:
        groups = [make_group(n, length=10_000) for n in range(8)]
        issue_and_add(journal, *groups)
        (file,) = data_file_paths(path).values()
        take(journal, 1, slots_of(groups))
        with closing(sqlite3.connect(path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT COUNT(*) FROM groups").fetchone()  # the log cannot be copied beyond what is read
            journal.forget_payloads(1)
            time.sleep(0.3)
            assert file.exists()
        issue_and_add(journal, make_group(20))
    assert not file.exists()
    with closing(Journal(path)) as again:
        assert_same(again.group(20), make_group(20))


def test_after_a_checkpoint_the_newest_groups_stay_within_the_budget(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.journal.data_files, "DATA_FILE_BYTES", 1000)
    one = train(journal, 1, 2, 3, 4, 5)
    files = data_file_paths(path)
    assert len(files) == 5
    room = 2 * PER_STEP * one + one  # for two steps and a half: whole steps go
    assert journal.forget_payloads(4, keep_bytes=room) == 3
    assert list(journal.kept_steps()) == [3, 4, 5], (
        "of the steps that the checkpoint holds two, and what it does not hold"
    )
    wait_until_gone(files[1], files[2])
    assert journal.group(PER_STEP * 4).token_ids.size
    assert journal.forget_payloads(5, keep_bytes=room) == 4
    assert list(journal.kept_steps()) == [4, 5]
    assert journal.forget_payloads(5, keep_bytes=0) == 6
    assert journal.payload_bytes == 0


def test_what_a_restart_needs_is_counted_without_what_is_only_kept(path: Path, journal: Journal) -> None:
    one = train(journal, 1, 2, 3)
    assert journal.needed_bytes == journal.payload_bytes
    journal.forget_payloads(2, keep_bytes=1 << 30)
    assert journal.payload_bytes == 3 * PER_STEP * one
    assert journal.needed_bytes == PER_STEP * one
    journal.close()
    with closing(Journal(path, saved_step=2)) as again:
        assert again.needed_bytes == PER_STEP * one, "a restart knows it too"


def test_files_of_kept_groups_are_neither_held_open_nor_read_at_the_start(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open 1,024 files; 100 GiB of groups lie in 1,600."""
    monkeypatch.setattr(asyncrl.journal.data_files, "DATA_FILE_BYTES", 1000)
    train(journal, 1)
    before = len(os.listdir("/proc/self/fd"))
    train(journal, *range(2, 20))
    assert len(os.listdir("/proc/self/fd")) == before
    issue_and_add(journal, make_group(1000))
    journal.close()
    read: list[int] = []
    original = asyncrl.journal.integrity.read_place
    monkeypatch.setattr(
        asyncrl.journal.integrity, "read_place", lambda fd, place: read.append(place.length) or original(fd, place)
    )
    with closing(Journal(path, saved_step=18)) as again:
        assert len(os.listdir("/proc/self/fd")) <= before
        assert again.group(PER_STEP).ticket_id == PER_STEP
    assert len(read) == PER_STEP + 1, "those of the last step, and the one that waits"


def test_damage_to_a_group_that_is_only_kept_does_not_stop_a_learner(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.journal.data_files, "DATA_FILE_BYTES", 1000)
    train(journal, 1, 2, 3)
    journal.close()
    files = data_file_paths(path)
    files[1].unlink()
    files[2].write_bytes(bytes(100))
    with pytest.raises(BadStateError, match="is missing"):
        Journal(path)
    with closing(Journal(path, saved_step=2)) as again:
        assert again.group(PER_STEP * 3).ticket_id == PER_STEP * 3
        with pytest.raises(BadStateError, match="damaged"):
            again.group(PER_STEP * 1)
        again.forget_payloads(3)
    Journal(path).close()
