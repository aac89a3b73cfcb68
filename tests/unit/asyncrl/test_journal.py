"""The journal on a disk that lies: what comes back is what was written, or the journal is refused as it is."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import asyncrl.journal.segments
import asyncrl.journal.writer
from asyncrl.config.run_sections import Durability
from asyncrl.errors import BadStateError
from asyncrl.journal.database import PAGE_BYTES
from asyncrl.journal.reader import JournalReader
from asyncrl.journal.segments import pack_frames
from asyncrl.journal.writer import JOURNAL_FILE, Journal, TicketSlot
from asyncrl.run_folder.full_disk import describe_full_disk, is_disk_full
from protocol.codec import encode
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus
from tests.rigs.file_sizes import file_size_limit

SEGMENTS = tuple(f".groups-{number:06d}" for number in range(1, 10))
SUFFIXES = ("", "-wal", ".commits", *SEGMENTS)
"""The journal's files, but for the index of the write-ahead log, which SQLite makes anew."""
SEGMENT_BYTES = 1 << 18
FRAME_BYTES = PAGE_BYTES + 24
"""A page in the write-ahead log, with its header."""


def make_group(ticket_id: int, tokens: int) -> Group:
    rng = np.random.default_rng(ticket_id)
    record = TrajectoryRecord(status=TrajectoryStatus.FINISHED, finish_reason=FinishReason.STOP, reward=1.0, turns=())
    return Group(
        ticket_id=ticket_id,
        server_id="s",
        prompt_ids=rng.integers(0, 99, 20, dtype=np.int32),
        image_grids=np.zeros((0, 3), np.int32),
        image_hashes=(),
        lengths=np.asarray([tokens], np.int32),
        token_ids=rng.integers(0, 99, tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        logprobs=rng.standard_normal(tokens).astype(np.float32),
        versions=np.zeros(tokens, np.int32),
        trajectories=(record,),
        timings=GroupTimings(queued_s=0, generate_s=0, reward_s=0),
    )


def issue(journal: Journal, slots: list[TicketSlot]) -> None:
    with journal.transaction():
        journal.add_tickets(slots)
        journal.count(issued=len(slots))


def keep(journal: Journal, group: Group) -> None:
    with journal.transaction():
        journal.add_group(group.ticket_id, encode(group))


def live(journal: Journal) -> list[TicketSlot]:
    state = journal.state()
    return [*state.waiting, *state.buffered]


def write_steps(journal: Journal, first: int, last: int, *, per_step: int = 4) -> None:
    """Steps of a run: tickets, groups from one page to several, one dropped and issued again, the batch taken."""
    for step in range(first, last + 1):
        base = step * 10
        issue(journal, [TicketSlot(base + i, step * per_step + i, step, 2) for i in range(per_step)])
        for i in range(per_step):
            keep(journal, make_group(base + i, 40 * 7**i))
        with journal.transaction():
            journal.drop_tickets([TicketSlot(base, step * per_step, step, 2)])
            journal.count(dropped_stale=1)
        if step % 3 == 0:
            continue  # its groups stay in the buffer, and its position to be issued again
        again = TicketSlot(base + 9, step * per_step, step, 2)
        issue(journal, [again])
        keep(journal, make_group(again.ticket_id, 10))
        taken = [slot for slot in live(journal) if base <= slot.ticket_id < base + 10]
        with journal.transaction():
            journal.consume(step, taken)
            journal.count(trained=len(taken))


def content(journal: Journal) -> dict[str, Any]:
    """Everything that a learner can read."""
    state = journal.state()
    counters = {name: count for name, count in state.counters.items() if count}
    consumed = {step: journal.consumed(step) for step in range(state.last_step + 1)}
    ids = [slot.ticket_id for slots in (state.buffered, *consumed.values()) for slot in slots]
    kept = {row[0] for row in journal._db.execute("SELECT ticket_id FROM groups")}
    groups = {i: b"".join(pack_frames(encode(journal.group(i)))) for i in ids if i in kept}
    facts = {key: journal.meta(key) for key in ("run_id", "settings", "nothing")}
    return {
        "counters": counters,
        "slots": (state.waiting, state.buffered, state.again, state.last_step),
        "consumed": consumed,
        "groups": groups,
        "kept": kept,
        "meta": facts,
    }


@dataclass
class Killed:
    """The files of a learner that was killed: most is in the database, the end in the write-ahead log."""

    folder: Path
    content: dict[str, Any]
    older: dict[str, bytes]
    """The same files some steps earlier."""
    named: tuple[int, ...]
    """Numbers of the segments that rows name; one whose groups are forgotten may be there for a moment longer."""

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target / JOURNAL_FILE


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A journal with tickets of every kind, groups forgotten, and a write-ahead log that was begun twice."""
    folder = tmp_path_factory.mktemp("killed")
    source = tmp_path_factory.mktemp("alive") / JOURNAL_FILE
    journal, older = Journal(source), {}
    with patch.object(asyncrl.journal.segments, "SEGMENT_BYTES", SEGMENT_BYTES):
        assert journal._copier is not None
        journal.set_meta(run_id="abc", settings='{"x": 1}')
        write_steps(journal, 1, 3)
        journal.forget_payloads(2)
        write_steps(journal, 4, 5)
        with journal._copier.paused:
            older = {suffix: _bytes(source, suffix) for suffix in SUFFIXES}
        journal.flush()
        write_steps(journal, 6, 7)
        issue(journal, [TicketSlot(500 + i, 100 + i, 7, 2) for i in range(3)])
        with journal._copier.paused:
            for suffix in SUFFIXES:
                if _bytes(source, suffix):
                    shutil.copy(source.with_name(source.name + suffix), folder)
        expected = content(journal)
        named = tuple(n for (n,) in journal._db.execute("SELECT DISTINCT segment FROM groups ORDER BY segment"))
    journal.close()
    assert (folder / f"{JOURNAL_FILE}-wal").stat().st_size > 10 * FRAME_BYTES
    assert (folder / JOURNAL_FILE).stat().st_size >= 10 * PAGE_BYTES
    assert len(named) >= 3
    return Killed(folder, expected, older, named)


def segments_of(killed: Killed) -> list[str]:
    return [f".groups-{number:06d}" for number in killed.named]


def is_refused(path: Path, expected: dict[str, Any]) -> str | None:
    """The reason; None where the journal opens. Then it must hold what it held, and take what comes next."""
    before = {suffix: _bytes(path, suffix) for suffix in SUFFIXES}
    try:
        journal = Journal(path)
    except BadStateError as problem:
        reason = str(problem)
    else:
        reason = None
    if reason is not None:
        assert str(path) in reason, "a reason names the file"
        assert {suffix: _bytes(path, suffix) for suffix in SUFFIXES} == before, "what is refused is left as it is"
        return reason
    with closing(journal):
        assert content(journal) == expected
        issue(journal, [TicketSlot(10_000, 10_000, 9, 2)])
    with closing(Journal(path)) as again:
        assert len(content(again)["slots"][0]) == len(expected["slots"][0]) + 1
    return None


def _bytes(path: Path, suffix: str) -> bytes:
    file = path.with_name(path.name + suffix)
    return file.read_bytes() if file.exists() else b""


def flip(path: Path, place: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ mask]))


def test_a_killed_learner_s_journal_comes_back_whole(killed: Killed, tmp_path: Path) -> None:
    assert is_refused(killed.copy(tmp_path), killed.content) is None


@pytest.mark.parametrize(("kind", "unit"), [("", PAGE_BYTES), ("-wal", FRAME_BYTES), (".groups", 16384)])
def test_a_flipped_bit_is_noticed_or_changes_nothing(killed: Killed, tmp_path: Path, kind: str, unit: int) -> None:
    """Three places in every page, one of them in its header; and every byte of the file's own header."""
    rng = random.Random(1)
    refused = tried = 0
    for suffix in segments_of(killed) if kind == ".groups" else [kind]:
        size = (killed.folder / f"{JOURNAL_FILE}{suffix}").stat().st_size
        pages = -(-size // unit)
        places = [page * unit + rng.randrange(below) for page in range(pages) for below in (unit, unit, 40)]
        for place in [*(place for place in places if place < size), *range(32 if suffix else 100)]:
            path = killed.copy(tmp_path)
            flip(path.with_name(path.name + suffix), place, 1 << rng.randrange(8))
            refused += is_refused(path, killed.content) is not None
            tried += 1
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    assert refused > tried // 5


@pytest.mark.parametrize("table", ["meta", "ledger", "tickets", "groups", "consumption", "again"])
def test_a_value_that_changes_where_sqlite_cannot_see_it_is_noticed(killed: Killed, tmp_path: Path, table: str) -> None:
    """Through SQLite itself, so that pages and indexes are perfect: every column of a row, a missing row, a new one."""
    with closing(sqlite3.connect(killed.copy(tmp_path / "columns"))) as db:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    for number, change in enumerate(
        [
            *(f"UPDATE {table} SET {column} = {_other(column)} WHERE rowid_ = first_" for column in columns),
            f"DELETE FROM {table} WHERE rowid_ = first_",
        ]
    ):
        path = killed.copy(tmp_path / str(number))
        key = columns[0]
        change = change.replace("rowid_", key).replace("first_", f"(SELECT MAX({key}) FROM {table})")
        with closing(sqlite3.connect(path)) as db:
            assert db.execute(change).rowcount == 1, change
            db.commit()
        assert is_refused(path, killed.content), change


def _other(column: str) -> str:
    if column in ("checksum", "value", "key", "name"):
        return f"CAST({column} || 'x' AS {'BLOB' if column == 'checksum' else 'TEXT'})"
    return f"{column} + 7777"


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_pages_of_an_earlier_time_are_noticed(killed: Killed, tmp_path: Path, suffix: str) -> None:
    """A write that the disk never made: the page is sound, and old."""
    unit = FRAME_BYTES if suffix else PAGE_BYTES
    old, new = killed.older[suffix], (killed.folder / f"{JOURNAL_FILE}{suffix}").read_bytes()
    for page in range(min(len(old), len(new)) // unit):
        place = slice(page * unit, (page + 1) * unit)
        if old[place] == new[place]:
            continue
        path = killed.copy(tmp_path / str(page))
        path.with_name(path.name + suffix).write_bytes(new[: place.start] + old[place] + new[place.stop :])
        is_refused(path, killed.content)


def test_a_zeroed_or_swapped_page_is_noticed(killed: Killed, tmp_path: Path) -> None:
    whole = (killed.folder / JOURNAL_FILE).read_bytes()
    pages = [whole[i : i + PAGE_BYTES] for i in range(0, len(whole), PAGE_BYTES)]
    for page in range(len(pages)):
        for name, changed in (
            ("zero", [*pages[:page], bytes(PAGE_BYTES), *pages[page + 1 :]]),
            ("swap", [*pages[:page], pages[-1 - page], *pages[page + 1 :]]),
        ):
            path = killed.copy(tmp_path / f"{name}{page}")
            path.write_bytes(b"".join(changed))
            is_refused(path, killed.content)


@pytest.mark.parametrize("kind", ["", "-wal", ".groups"])
def test_a_truncated_file_is_refused_wherever_it_ends(killed: Killed, tmp_path: Path, kind: str) -> None:
    suffix = segments_of(killed)[-1] if kind == ".groups" else kind
    size = (killed.folder / f"{JOURNAL_FILE}{suffix}").stat().st_size
    rng = random.Random(2)
    for number, end in enumerate([0, 1, 100, PAGE_BYTES, size - 1, *(rng.randrange(size) for _ in range(20))]):
        path = killed.copy(tmp_path / str(number))
        with path.with_name(path.name + suffix).open("r+b") as file:
            file.truncate(end)
        reason = is_refused(path, killed.content)
        if suffix:
            assert reason, end


def test_groups_that_are_missing_zeroed_or_in_another_file_are_noticed(killed: Killed, tmp_path: Path) -> None:
    """What a disk leaves that never made its last writes: a name without a file, a file without bytes."""
    for suffix in segments_of(killed):
        path = killed.copy(tmp_path / f"missing{suffix}")
        file = path.with_name(path.name + suffix)
        whole = file.read_bytes()
        file.unlink()
        reason = is_refused(path, killed.content)
        assert reason is not None
        assert f"{file} with its groups is missing" in reason
        path = killed.copy(tmp_path / f"zeroed{suffix}")
        path.with_name(path.name + suffix).write_bytes(bytes(len(whole)))
        reason = is_refused(path, killed.content)
        assert reason is not None
        assert "does not have its checksum" in reason
    first, last, *_ = segments_of(killed)
    path = killed.copy(tmp_path / "swapped")
    one, other = (path.with_name(path.name + suffix) for suffix in (first, last))
    content_of_one = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content_of_one)
    assert is_refused(path, killed.content)


def test_bytes_that_no_row_names_are_ignored_and_removed(killed: Killed, tmp_path: Path) -> None:
    """The end of a segment, and a segment, of transactions that did not commit."""
    path = killed.copy(tmp_path)
    last = path.with_name(path.name + segments_of(killed)[-1])
    whole = last.read_bytes()
    last.write_bytes(whole + bytes(5000))
    orphan = path.with_name(path.name + SEGMENTS[-1])
    orphan.write_bytes(b"x" * 5000)
    assert is_refused(path, killed.content) is None
    assert last.stat().st_size <= len(whole)
    assert not orphan.exists()


def test_a_write_ahead_log_that_was_removed_is_missed(killed: Killed, tmp_path: Path) -> None:
    path = killed.copy(tmp_path)
    path.with_name(path.name + "-wal").unlink()
    reason = is_refused(path, killed.content)
    assert reason is not None
    assert "its write-ahead log is damaged or missing" in reason
    (tmp_path / f"{JOURNAL_FILE}.commits").unlink()  # as the message says: accept the loss
    with closing(Journal(path)) as shorter:
        assert content(shorter) != killed.content


def test_after_a_power_cut_the_loss_of_what_was_not_on_the_disk_can_be_accepted(tmp_path: Path) -> None:
    """With `process`, rows may have reached the disk and the groups that they name not."""
    source, path = tmp_path / "alive" / JOURNAL_FILE, tmp_path / "dead" / JOURNAL_FILE
    source.parent.mkdir()
    with closing(Journal(source)) as journal:
        write_steps(journal, 1, 4)
        journal.flush()
        on_disk, expected = journal._segments.file_bytes, content(journal)
        write_steps(journal, 5, 5)
        shutil.copytree(source.parent, path.parent)
    with path.with_name(path.name + SEGMENTS[0]).open("r+b") as file:
        file.truncate(on_disk)
    reason = is_refused(path, expected)
    assert reason is not None
    log, mark = (path.with_name(path.name + suffix) for suffix in ("-wal", ".commits"))
    assert f"to accept their loss, remove {log} and {mark}" in reason
    for file in (log, mark, path.with_name(path.name + "-shm")):
        file.unlink()
    assert is_refused(path, expected) is None


@pytest.mark.parametrize("mark", [b"no number at all", b"00000000000000009999", b"\xff" * 20])
def test_a_damaged_commit_mark_is_refused(killed: Killed, tmp_path: Path, mark: bytes) -> None:
    path = killed.copy(tmp_path)
    (tmp_path / f"{JOURNAL_FILE}.commits").write_bytes(mark)
    assert is_refused(path, killed.content)


def test_a_journal_of_another_schema_or_of_no_database_is_refused(killed: Killed, tmp_path: Path) -> None:
    path = killed.copy(tmp_path / "schema")
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    reason = is_refused(path, killed.content)
    assert reason is not None
    assert "has schema 99, and this version of asyncrl reads schema 3" in reason
    (tmp_path / "text").mkdir()
    text = tmp_path / "text" / JOURNAL_FILE
    text.write_text("not a database " * 100)
    assert is_refused(text, killed.content)


def test_a_run_that_died_before_its_first_commit_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    path.touch()
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        expected = content(journal)
    path.write_bytes(b"")
    assert is_refused(path, expected), "but not a run that has committed"


def test_a_transaction_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 3)
        expected = content(journal)
        with pytest.raises(BadStateError, match="UNIQUE"):
            issue(journal, [TicketSlot(900, 900, 1, 1), TicketSlot(901, 900, 1, 1)])
        assert content(journal) == expected
        write_steps(journal, 4, 4)
        expected = content(journal)
    assert is_refused(path, expected) is None


def test_a_database_that_is_full_says_so_and_continues_after_room_was_made(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 2)
        expected = content(journal)
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(BadStateError, match="database or disk is full") as caught:
            issue(journal, [TicketSlot(i, i, 2, 2) for i in range(1000, 9000)])
        assert is_disk_full(caught.value)
        assert content(journal) == expected
    assert is_refused(path, expected) is None


@pytest.mark.parametrize("file", ["-wal", SEGMENTS[0]])
def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path, file: str) -> None:
    """SQLite calls it an I/O error. A group of which a part was written is not there."""
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        issue(journal, [TicketSlot(20, 20, 2, 2)])
        before = content(journal)
        size = path.with_name(f"{JOURNAL_FILE}-wal").stat().st_size
        limit = file_size_limit(size + 3 * PAGE_BYTES)
        write_too_much = {
            "-wal": lambda: issue(journal, [TicketSlot(i, i, 2, 2) for i in range(1000, 99_000)]),
            SEGMENTS[0]: lambda: keep(journal, make_group(20, size)),
        }
        with limit, pytest.raises(BadStateError, match="File too large") as caught:
            write_too_much[file]()
        assert is_disk_full(caught.value)
        with file_size_limit(size):
            reason = describe_full_disk(caught.value, tmp_path)
        assert f"a file in {tmp_path} is as large as this process may make it" in reason
        assert "Raise the limit and start again, with --resume" in reason
        assert content(journal) == before
    assert is_refused(path, before) is None


def test_no_room_for_shared_memory_at_opening_is_a_full_disk(tmp_path: Path) -> None:
    """SQLite has codes of its own for it, and calls it an I/O error, too."""
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        before = content(journal)
    for begin in (Journal, JournalReader):
        with (
            file_size_limit(PAGE_BYTES),
            pytest.raises(BadStateError, match=r"File too large\. Nothing is lost") as caught,
        ):
            begin(path)
        assert is_disk_full(caught.value)
    assert is_refused(path, before) is None


def test_an_error_is_no_full_disk_where_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
    (tmp_path / f"{JOURNAL_FILE}-wal").symlink_to(tmp_path)
    with pytest.raises(BadStateError, match=r"unable to open database file\. Restore it") as caught:
        JournalReader(path)
    assert not is_disk_full(caught.value)


def test_a_process_that_dies_between_the_bytes_and_their_rows_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alive" / JOURNAL_FILE
    path.parent.mkdir()
    places = []

    def die(place: str) -> None:
        places.append(place)
        shutil.copytree(path.parent, tmp_path / "dead", dirs_exist_ok=True)

    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        issue(journal, [TicketSlot(20, 20, 2, 2)])
        expected = content(journal)
        committed = journal._segments.file_bytes
        monkeypatch.setattr(asyncrl.journal.writer, "crash_point", die)
        keep(journal, make_group(20, 5000))
    assert places == ["journal.segment_written"]
    dead = tmp_path / "dead" / f"{JOURNAL_FILE}{SEGMENTS[0]}"
    assert dead.stat().st_size > committed + 5000
    assert is_refused(tmp_path / "dead" / JOURNAL_FILE, expected) is None
    assert dead.stat().st_size == committed


@pytest.mark.parametrize("durability", ["process", "power"])
def test_with_power_the_groups_are_on_the_disk_before_the_rows_that_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    synced: list[int] = []
    sync = os.fdatasync

    def fdatasync(fd: int) -> None:
        sync(fd)
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with closing(Journal(tmp_path / JOURNAL_FILE, durability)) as journal:
        issue(journal, [TicketSlot(1, 1, 0, 1)])
        with journal.transaction():
            journal.add_group(1, encode(make_group(1, 500)))
            assert not synced
        assert synced == ([journal.payload_bytes] if durability == "power" else [])
        journal.flush()
        assert synced == [journal.payload_bytes], "before a checkpoint relies on them in both modes"
