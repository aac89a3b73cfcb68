"""Groups in the journal: kept as they travelled, small, copied out of the log beside the writing, of one format."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import asyncrl.journal.segments
import asyncrl.journal.writer
from asyncrl.errors import BadStateError
from asyncrl.journal.database import PAGE_BYTES
from asyncrl.journal.segments import pack_frames, segment_files, unpack_group
from asyncrl.journal.writer import Journal, TicketSlot
from protocol.codec import encode
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus, Turn

COLUMNS = ("prompt_ids", "image_grids", "lengths", "token_ids", "loss_mask", "logprobs", "versions", "kv_versions")


def make_group(ticket_id: int, *, length: int = 1000, versions: int | None = None) -> Group:
    """Two trajectories; `versions` None: they change in the middle of each."""
    random = np.random.default_rng(ticket_id)
    changing = np.repeat(np.asarray([4, 5, 4, 5], np.int32), length // 2)
    record = TrajectoryRecord(
        status=TrajectoryStatus.FINISHED,
        finish_reason=FinishReason.STOP,
        rewards={"exact": 0.25},
        reward=0.25,
        turns=(Turn(start=0, end=length),),
    )
    return Group(
        ticket_id=ticket_id,
        server_id="s",
        prompt_ids=np.arange(7, dtype=np.int32),
        image_grids=np.asarray([[1, 4, 4]], np.int32),
        image_hashes=("a" * 64,),
        lengths=np.full(2, length, np.int32),
        token_ids=random.integers(0, 1000, 2 * length).astype(np.int32),
        loss_mask=np.ones(2 * length, np.uint8),
        logprobs=-random.random(2 * length, np.float32),
        versions=changing if versions is None else np.full(2 * length, versions, np.int32),
        kv_versions=None if versions is None else np.full(2 * length, versions, np.int32),
        trajectories=(record, record),
        timings=GroupTimings(queued_s=0.0, generate_s=1.0, reward_s=0.0),
    )


def keep(journal: Journal, *groups: Group, at: int = 0) -> None:
    slots = [TicketSlot(group.ticket_id, group.ticket_id, at, 1) for group in groups]
    with journal.transaction():
        journal.add_tickets(slots)
        for group in groups:
            journal.add_group(group.ticket_id, encode(group))
        journal.count(issued=len(groups))


def assert_same(one: Group, other: Group) -> None:
    for name in COLUMNS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and np.array_equal(mine, theirs)), name
    assert one.model_dump(exclude=set(COLUMNS)) == other.model_dump(exclude=set(COLUMNS))


@pytest.mark.parametrize("group", [make_group(1), make_group(2, versions=3), make_group(3, length=2)])
def test_a_group_comes_back_as_it_was(group: Group) -> None:
    assert_same(unpack_group(b"".join(pack_frames(encode(group)))), group)


def test_columns_of_one_value_take_no_room() -> None:
    group = make_group(1, versions=3)
    needed = group.token_ids.nbytes + group.logprobs.nbytes
    assert needed < sum(map(len, pack_frames(encode(group)))) < needed + 2000


def test_a_column_that_differs_in_one_place_is_kept_whole() -> None:
    group = make_group(1, versions=3)
    versions = group.versions.copy()
    versions[500] = 2
    changed = group.model_copy(update={"versions": versions})
    assert_same(unpack_group(b"".join(pack_frames(encode(changed)))), changed)


def test_the_log_is_copied_beside_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncrl.journal.writer, "LOG_BYTES", 1 << 16)
    journal = Journal(tmp_path / "journal.sqlite")
    size_before = journal.path.stat().st_size  # type: ignore[union-attr]
    for n in range(8):
        keep(journal, make_group(n, length=20_000))
    deadline = time.monotonic() + 20
    while (tmp_path / "journal.sqlite").stat().st_size == size_before:
        assert time.monotonic() < deadline, "nothing has been copied"
        time.sleep(0.01)
    keep(journal, make_group(8))
    journal.flush()
    assert (tmp_path / "journal.sqlite-wal").stat().st_size == 0
    assert_same(journal.group(3), make_group(3, length=20_000))
    journal.close()


def test_a_log_that_cannot_be_copied_stops_the_next_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.journal.writer, "LOG_BYTES", 1 << 12)
    journal = Journal(tmp_path / "journal.sqlite")
    connect = sqlite3.connect

    def out_of_order(*arguments: object, **options: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", out_of_order)
    keep(journal, make_group(0, length=20_000))
    monkeypatch.setattr(sqlite3, "connect", connect)
    assert journal._copier is not None
    assert journal._copier._thread is not None
    journal._copier._thread.join(20)
    with pytest.raises(BadStateError, match="disk I/O error"):
        keep(journal, make_group(1))
    journal.close()


def take(journal: Journal, step: int, *groups: Group) -> None:
    with journal.transaction():
        journal.consume(step, [TicketSlot(g.ticket_id, g.ticket_id, 0, 1) for g in groups])
        journal.count(trained=len(groups))


def wait_until_gone(*files: Path) -> None:
    deadline = time.monotonic() + 20
    while any(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} should have been deleted"
        time.sleep(0.01)


def test_forgotten_groups_leave_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for step in range(1, 7):
        groups = [make_group(8 * step + n, length=10_000) for n in range(8)]
        keep(journal, *groups)
        (file,) = segment_files(path).values()
        assert journal.payload_bytes == file.stat().st_size
        take(journal, step, *groups)
        journal.forget_payloads(step)
        assert journal.payload_bytes == 0
        wait_until_gone(file)
        journal.flush()
        assert journal.file_bytes < 40 * PAGE_BYTES
    journal.close()


def test_a_segment_stays_until_its_last_group_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncrl.journal.segments, "SEGMENT_BYTES", 400_000)  # two groups
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    groups = [make_group(n, length=10_000) for n in range(6)]
    for group in groups:
        keep(journal, group)
    first, second, third = segment_files(path).values()
    take(journal, 1, *groups[:3])
    take(journal, 2, *groups[4:])
    journal.forget_payloads(1)
    wait_until_gone(first)
    assert_same(journal.group(3), groups[3])
    journal.forget_payloads(2)
    wait_until_gone(third)
    assert second.exists()
    assert_same(journal.group(3), groups[3])
    keep(journal, make_group(9))
    assert_same(journal.group(9), make_group(9))
    journal.close()


def test_a_file_is_deleted_only_after_the_log_that_forgets_it_is_on_the_disk(tmp_path: Path) -> None:
    """Otherwise a power cut could leave a row without its group."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    groups = [make_group(n, length=10_000) for n in range(8)]
    keep(journal, *groups)
    (file,) = segment_files(path).values()
    take(journal, 1, *groups)
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM groups").fetchone()  # the log cannot be copied beyond what is read
        journal.forget_payloads(1)
        time.sleep(0.3)
        assert file.exists()
    keep(journal, make_group(20))
    journal.close()
    assert not file.exists()
    again = Journal(path)
    assert_same(again.group(20), make_group(20))
    again.close()


def test_a_journal_in_memory_keeps_groups_as_one_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncrl.journal.segments, "SEGMENT_BYTES", 400_000)
    journal = Journal(None)
    groups = [make_group(n, length=10_000) for n in range(6)]
    for group in groups:
        keep(journal, group)
    take(journal, 1, *groups[:5])
    journal.forget_payloads(1)
    assert_same(journal.group(5), groups[5])
    journal.close()


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    keep(journal, make_group(0))
    journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(BadStateError, match=r"schema 1, and this version of asyncrl reads schema 3"):
        Journal(tmp_path / "journal.sqlite")


def test_a_journal_killed_between_two_copies_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncrl.journal.writer, "LOG_BYTES", 1 << 16)
    journal = Journal(tmp_path / "journal.sqlite")
    for n in range(30):
        keep(journal, make_group(n, length=10_000))
    # What a killed process leaves: the files as they are at this moment, in any state of the copying.
    killed = tmp_path / "killed"
    killed.mkdir()
    with journal._copier.paused:  # type: ignore[union-attr]  # a file cannot be copied at one moment while it changes
        for file in tmp_path.glob("journal.sqlite*"):
            shutil.copy(file, killed / file.name)
    journal.close()
    again = Journal(killed / "journal.sqlite")
    assert [slot.ticket_id for slot in again.state().buffered] == list(range(30))
    assert_same(again.group(29), make_group(29, length=10_000))
    again.close()
