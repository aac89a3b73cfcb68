"""The journal on a disk that lies: what comes back is what was written, or the journal is refused as it is."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import asyncrl.journal.data_files
import asyncrl.journal.writer
from asyncrl.config.run_sections import Durability
from asyncrl.errors import BadStateError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.data_files import pack_frames
from asyncrl.journal.database import PAGE_BYTES
from asyncrl.journal.full_disk import describe_full_disk, is_disk_full
from asyncrl.journal.writer import Journal, TicketSlot
from protocol.codec import encode
from tests.rigs.file_sizes import file_size_limit
from tests.rigs.journal_groups import add, issue, make_group, take, wait_for_copy

SEGMENTS = tuple(f".groups-{number:06d}" for number in range(1, 10))
SUFFIXES = ("", "-wal", ".commits", *SEGMENTS)
"""The journal's files, but for the index of the write-ahead log, which SQLite makes anew."""
FRAME_BYTES = PAGE_BYTES + 24
"""A page in the write-ahead log, with its header."""


def write_steps(journal: Journal, first: int, last: int, *, per_step: int = 4) -> None:
    """Steps of a run: tickets, groups from one page to several, one dropped and issued again, the batch taken."""
    for step in range(first, last + 1):
        base = step * 10
        issue(journal, [TicketSlot(base + i, step * per_step + i, step, 2) for i in range(per_step)])
        for i in range(per_step):
            add(journal, make_group(base + i, length=20 * 7**i))
        with journal.transaction():
            journal.drop_tickets([TicketSlot(base, step * per_step, step, 2)])
            journal.count(dropped_stale=1)
        with journal.transaction():
            filtered = TicketSlot(base + 8, 10_000 + step, step, 2)
            journal.add_tickets([filtered])
            journal.filter_out({filtered: "zero_variance"})
            journal.count(issued=1, dropped_zero_variance=1)
            journal.set_prompt_source({"row 1": float(step), f"row {step}": 0.5})
        if step % 3 == 0:
            continue  # its groups stay in the buffer, and its position to be issued again
        again = TicketSlot(base + 9, step * per_step, step, 2)
        issue(journal, [again])
        add(journal, make_group(again.ticket_id, length=10))
        state = journal.state()
        take(journal, step, [slot for slot in (*state.waiting, *state.buffered) if base <= slot.ticket_id < base + 10])
        if step > 1:
            with journal.transaction():
                journal.replay(step, journal.consumed(1)[:1])
                journal.count(replayed=1)


def content(journal: Journal) -> dict[str, Any]:
    """Everything that a learner can read."""
    state = journal.state()
    consumed = {step: journal.consumed(step) for step in range(state.last_step + 1)}
    ids = [slot.ticket_id for slots in (state.buffered, *consumed.values()) for slot in slots]
    kept = {row[0] for row in journal._db.execute("SELECT ticket_id FROM groups")}
    return {
        "counters": {name: count for name, count in state.counters.items() if count},
        "slots": (state.waiting, state.buffered, state.again, state.last_step),
        "consumed": consumed,
        "filtered": journal.filtered(),
        "replayed": {step: journal.replayed(step) for step in consumed},
        "prompt_source": state.prompt_source,
        "groups": {i: b"".join(pack_frames(encode(journal.group(i)))) for i in ids if i in kept},
        "kept": kept,
        "meta": {key: journal.meta(key) for key in ("run_id", "settings", "nothing")},
    }


@dataclass
class Killed:
    """The files of a learner that was killed: most is in the database, the end in the write-ahead log."""

    folder: Path
    content: dict[str, Any]
    older: dict[str, bytes]
    """The same files some steps earlier."""
    segments: list[str]
    """Data files that rows name; one whose groups are forgotten may exist for a moment longer."""

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target / JOURNAL_FILE

    def refuses(self, target: Path, suffix: str, change: Callable[[bytes], bytes | None]) -> str | None:
        """Why a copy is refused in which one file is changed, or removed (None). See `is_refused`."""
        path = self.copy(target)
        file = path.with_name(path.name + suffix)
        changed = change(file.read_bytes())
        file.unlink() if changed is None else file.write_bytes(changed)
        return is_refused(path, self.content)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A journal with tickets of every kind, groups forgotten, and a write-ahead log that was begun twice."""
    folder = tmp_path_factory.mktemp("killed")
    source = tmp_path_factory.mktemp("alive") / JOURNAL_FILE
    journal = Journal(source)
    with patch.object(asyncrl.journal.data_files, "DATA_FILE_BYTES", 1 << 18):
        journal.set_meta(run_id="abc", settings='{"x": 1}')
        write_steps(journal, 1, 3)
        journal.forget_payloads(2)
        write_steps(journal, 4, 5)
        wait_for_copy(journal)
        older = read_files(source)
        journal.flush()
        write_steps(journal, 6, 7)
        issue(journal, [TicketSlot(500 + i, 100 + i, 7, 2) for i in range(3)])
        wait_for_copy(journal)
        for suffix, data in read_files(source).items():
            if data:
                (folder / f"{JOURNAL_FILE}{suffix}").write_bytes(data)
        expected = content(journal)
        named = [n for (n,) in journal._db.execute("SELECT DISTINCT data_file FROM groups ORDER BY data_file")]
    journal.close()
    assert (folder / f"{JOURNAL_FILE}-wal").stat().st_size > 10 * FRAME_BYTES
    assert (folder / JOURNAL_FILE).stat().st_size >= 10 * PAGE_BYTES
    assert len(named) >= 3
    return Killed(folder, expected, older, [SEGMENTS[number - 1] for number in named])


def read_files(path: Path) -> dict[str, bytes]:
    """Suffix -> content, empty where the file does not exist."""
    files = {suffix: path.with_name(path.name + suffix) for suffix in SUFFIXES}
    return {suffix: file.read_bytes() if file.exists() else b"" for suffix, file in files.items()}


def is_refused(path: Path, expected: dict[str, Any]) -> str | None:
    """The reason; None where the journal opens. Then it must hold what it held, and take what comes next."""
    before = read_files(path)
    try:
        journal = Journal(path)
    except BadStateError as problem:
        reason = str(problem)
        assert str(path) in reason, "a reason names the file"
        assert read_files(path) == before, "what is refused is left as it is"
        return reason
    with closing(journal):
        assert content(journal) == expected
        issue(journal, [TicketSlot(10_000, 10_000, 9, 2)])
    with closing(Journal(path)) as again:
        assert len(again.state().waiting) == len(expected["slots"][0]) + 1
    return None


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "unit"), [("", PAGE_BYTES), ("-wal", FRAME_BYTES), (".groups", 16384)])
def test_a_flipped_bit_is_noticed_or_changes_nothing(killed: Killed, tmp_path: Path, kind: str, unit: int) -> None:
    """Two places in every page, one of them in its header; and every byte at the file's beginning."""
    rng = random.Random(1)
    refused = tried = 0
    for suffix in killed.segments if kind == ".groups" else [kind]:
        size = (killed.folder / f"{JOURNAL_FILE}{suffix}").stat().st_size
        places = [page + rng.randrange(below) for page in range(0, size, unit) for below in (unit, 40)]
        header = 32 if suffix else 100
        for place in [*(place for place in places if place < size), *range(header)]:
            mask = 1 << rng.randrange(8)

            def flip(data: bytes, place: int = place, mask: int = mask) -> bytes:
                return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]

            refused += killed.refuses(tmp_path, suffix, flip) is not None
            tried += 1
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    assert refused > tried // 5


@pytest.mark.parametrize(
    "table", ["meta", "ledger", "tickets", "groups", "consumption", "replayed", "again", "filtered", "prompt_source"]
)
def test_a_value_that_changes_where_sqlite_cannot_see_it_is_noticed(killed: Killed, tmp_path: Path, table: str) -> None:
    """Through SQLite itself, so that pages and indexes are perfect: every column of a row, and a missing row."""
    with closing(sqlite3.connect(killed.copy(tmp_path / "columns"))) as db:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    where = f"WHERE {columns[0]} = (SELECT MAX({columns[0]}) FROM {table})"
    changes = [f"UPDATE {table} SET {column} = {_other(column)} {where}" for column in columns]
    if table == "meta":
        changes.append("PRAGMA user_version = 99")
    for number, change in enumerate([*changes, f"DELETE FROM {table} {where}"]):
        path = killed.copy(tmp_path / str(number))
        with closing(sqlite3.connect(path)) as db:
            assert db.execute(change).rowcount == 1 or "PRAGMA" in change, change
            db.commit()
        assert is_refused(path, killed.content), change


def _other(column: str) -> str:
    if column in ("checksum", "value", "key", "name", "reason"):
        return f"CAST({column} || 'x' AS {'BLOB' if column == 'checksum' else 'TEXT'})"
    return f"{column} + 7777"


@pytest.mark.parametrize(("suffix", "unit"), [("", PAGE_BYTES), ("-wal", FRAME_BYTES)])
def test_a_page_that_is_old_zeroed_or_anothers_is_noticed_or_changes_nothing(
    killed: Killed, tmp_path: Path, suffix: str, unit: int
) -> None:
    """A write that the disk never made leaves a page that is sound, and old."""
    old, new = killed.older[suffix], (killed.folder / f"{JOURNAL_FILE}{suffix}").read_bytes()
    pages = [new[start : start + unit] for start in range(0, len(new) - unit + 1, unit)]
    for number, page in enumerate(pages):
        place = slice(number * unit, (number + 1) * unit)
        for wrong in {old[place].ljust(unit, b"\0"), bytes(unit), pages[-1 - number]} - {page}:
            changed = new[: place.start] + wrong + new[place.stop :]
            killed.refuses(tmp_path / "page", suffix, lambda data, changed=changed: changed)
            shutil.rmtree(tmp_path / "page")


@pytest.mark.parametrize("kind", ["", "-wal", ".groups"])
def test_a_truncated_file_is_refused_wherever_it_ends(killed: Killed, tmp_path: Path, kind: str) -> None:
    suffix = killed.segments[-1] if kind == ".groups" else kind
    size = (killed.folder / f"{JOURNAL_FILE}{suffix}").stat().st_size
    rng = random.Random(2)
    for end in [0, 1, 100, PAGE_BYTES, size - 1, *(rng.randrange(size) for _ in range(20))]:
        reason = killed.refuses(tmp_path / str(end), suffix, lambda data, end=end: data[:end])
        assert reason or not suffix, end


def test_groups_that_are_missing_or_in_another_file_are_noticed(killed: Killed, tmp_path: Path) -> None:
    path = killed.copy(tmp_path)
    one, other = (path.with_name(path.name + suffix) for suffix in killed.segments[:2])
    whole = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(whole)
    assert "does not have its checksum" in (is_refused(path, killed.content) or "")
    one.unlink()
    assert f"{one} with its groups is missing" in (is_refused(path, killed.content) or "")


def test_a_killed_learner_s_journal_comes_back_without_bytes_that_no_row_names(killed: Killed, tmp_path: Path) -> None:
    """The end of a segment, and a segment, of transactions that did not commit."""
    path = killed.copy(tmp_path)
    last, orphan = (path.with_name(path.name + suffix) for suffix in (killed.segments[-1], SEGMENTS[-1]))
    whole = last.read_bytes()
    last.write_bytes(whole + bytes(5000))
    orphan.write_bytes(b"x" * 5000)
    assert is_refused(path, killed.content) is None
    assert last.stat().st_size <= len(whole)
    assert not orphan.exists()


def test_a_write_ahead_log_that_was_removed_is_missed(killed: Killed, tmp_path: Path) -> None:
    reason = killed.refuses(tmp_path, "-wal", lambda data: None)
    assert reason is not None
    assert "its write-ahead log is damaged or missing" in reason
    (tmp_path / f"{JOURNAL_FILE}.commits").unlink()  # as the message says: accept the loss
    with closing(Journal(tmp_path / JOURNAL_FILE)) as shorter:
        assert content(shorter) != killed.content


def test_after_a_power_cut_the_loss_of_what_was_not_on_the_disk_can_be_accepted(tmp_path: Path) -> None:
    """With `process`, rows may have reached the disk and the groups that they name not."""
    source, path = tmp_path / "alive" / JOURNAL_FILE, tmp_path / "dead" / JOURNAL_FILE
    source.parent.mkdir()
    with closing(Journal(source)) as journal:
        write_steps(journal, 1, 4)
        journal.flush()
        on_disk, expected = journal._files.file_bytes, content(journal)
        write_steps(journal, 5, 5)
        shutil.copytree(source.parent, path.parent)
    os.truncate(path.with_name(path.name + SEGMENTS[0]), on_disk)
    reason = is_refused(path, expected)
    assert reason is not None
    log, mark = (path.with_name(path.name + suffix) for suffix in ("-wal", ".commits"))
    assert f"to accept their loss, remove {log} and {mark}" in reason
    for file in (log, mark, path.with_name(path.name + "-shm")):
        file.unlink()
    assert is_refused(path, expected) is None


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".commits", b"no number at all"),
        (".commits", b"00000000000000009999"),
        (".commits", b"\xff" * 20),
        ("", b"not a database " * 100),
    ],
)
def test_a_file_with_other_content_is_refused(killed: Killed, tmp_path: Path, suffix: str, content: bytes) -> None:
    assert killed.refuses(tmp_path, suffix, lambda data: content)


def test_a_run_that_died_before_its_first_commit_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    path.touch()
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        expected = content(journal)
    path.write_bytes(b"")
    assert is_refused(path, expected), "but not a run that has committed"


# --- transactions that fail --------------------------------------------------------------------------


def violate_uniqueness(journal: Journal) -> None:
    issue(journal, [TicketSlot(900, 900, 1, 1), TicketSlot(901, 900, 1, 1)])


def fill_the_database(journal: Journal) -> None:
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    issue(journal, [TicketSlot(i, i, 2, 2) for i in range(1000, 9000)])


@pytest.mark.parametrize(
    ("fail", "message", "is_full"),
    [(violate_uniqueness, "UNIQUE", False), (fill_the_database, "database or disk is full", True)],
)
def test_a_transaction_that_fails_leaves_no_trace(
    tmp_path: Path, fail: Callable[[Journal], None], message: str, is_full: bool
) -> None:
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 2)
        expected = content(journal)
        with pytest.raises(BadStateError, match=message) as caught:
            fail(journal)
        assert is_disk_full(caught.value) == is_full
        assert content(journal) == expected
    assert is_refused(path, expected) is None


@pytest.mark.parametrize("file", ["-wal", SEGMENTS[0]])
def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path, file: str) -> None:
    """SQLite calls it an I/O error. A group of which a part was written is not kept."""
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        issue(journal, [TicketSlot(20, 20, 2, 2)])
        before = content(journal)
        size = path.with_name(f"{JOURNAL_FILE}-wal").stat().st_size
        write_too_much = {
            "-wal": lambda: issue(journal, [TicketSlot(i, i, 2, 2) for i in range(1000, 99_000)]),
            SEGMENTS[0]: lambda: add(journal, make_group(20, length=size)),
        }
        with file_size_limit(size + 3 * PAGE_BYTES), pytest.raises(BadStateError, match="File too large") as caught:
            write_too_much[file]()
        assert is_disk_full(caught.value)
        with file_size_limit(size):
            reason = describe_full_disk(caught.value, tmp_path)
        assert f"a file in {tmp_path} is as large as this process may make it" in reason
        assert "Raise the limit and start again, with --resume" in reason
        assert content(journal) == before
    assert is_refused(path, before) is None


def test_a_process_that_dies_between_the_bytes_and_their_rows_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dead = tmp_path / "alive" / JOURNAL_FILE, tmp_path / "dead" / JOURNAL_FILE
    path.parent.mkdir()

    def die(place: str) -> None:
        assert place == "journal.data_file_written"
        shutil.copytree(path.parent, dead.parent, dirs_exist_ok=True)

    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        issue(journal, [TicketSlot(20, 20, 2, 2)])
        expected = content(journal)
        committed = journal._files.file_bytes
        monkeypatch.setattr(asyncrl.journal.writer, "crash_point", die)
        add(journal, make_group(20, length=5000))
    segment = dead.with_name(dead.name + SEGMENTS[0])
    assert segment.stat().st_size > committed + 5000
    monkeypatch.setattr(asyncrl.journal.writer, "crash_point", lambda place: None)
    assert is_refused(dead, expected) is None
    assert segment.stat().st_size == committed


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
            journal.add_group(1, encode(make_group(1, length=500)))
            assert not synced
        assert synced == ([journal.payload_bytes] if durability == "power" else [])
        journal.flush()
        assert synced == [journal.payload_bytes], "before a checkpoint relies on them in both modes"
