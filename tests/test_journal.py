"""The journal on a disk that lies: what comes back is what was written, or the journal is refused as it is."""

from __future__ import annotations

import random
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import BadStateError
from asyncrl.telemetry.failure import describe_full_disk, is_disk_full
from learner.group_payload import pack_frames
from learner.journal import JOURNAL_FILE, PAGE_BYTES, Journal, TicketSlot
from protocol.codec import encode
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus

SUFFIXES = ("", "-wal", ".commits")
"""The journal's files, but for the index of the write-ahead log, which SQLite makes anew."""
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


def live(journal: Journal) -> list[TicketSlot]:
    state = journal.state()
    return [*state.waiting, *state.buffered]


def write_steps(journal: Journal, first: int, last: int, *, per_step: int = 4) -> None:
    """Steps of a run: tickets, groups from one page to several, one dropped and issued again, the batch taken."""
    for step in range(first, last + 1):
        base = step * 10
        issue(journal, [TicketSlot(base + i, step * per_step + i, step, 2) for i in range(per_step)])
        for i in range(per_step):
            with journal.transaction():
                journal.add_group(base + i, encode(make_group(base + i, 40 * 7**i)))
        with journal.transaction():
            journal.drop_tickets([TicketSlot(base, step * per_step, step, 2)])
            journal.count(dropped_stale=1)
        if step % 3 == 0:
            continue  # its groups stay in the buffer, and its position to be issued again
        again = TicketSlot(base + 9, step * per_step, step, 2)
        issue(journal, [again])
        with journal.transaction():
            journal.add_group(again.ticket_id, encode(make_group(again.ticket_id, 10)))
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
    groups = {i: pack_frames(encode(journal.group(i))) for i in ids if i in kept}
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

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target / JOURNAL_FILE


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A journal with tickets of every kind, groups forgotten, and a write-ahead log that was begun twice."""
    folder = tmp_path_factory.mktemp("killed")
    source = tmp_path_factory.mktemp("alive") / JOURNAL_FILE
    journal = Journal(source)
    journal.set_meta(run_id="abc", settings='{"x": 1}')
    write_steps(journal, 1, 3)
    journal.forget_payloads(1)
    write_steps(journal, 4, 5)
    older = {suffix: source.with_name(source.name + suffix).read_bytes() for suffix in SUFFIXES}
    journal.flush()
    write_steps(journal, 6, 7)
    issue(journal, [TicketSlot(500 + i, 100 + i, 7, 2) for i in range(3)])
    for suffix in SUFFIXES:
        shutil.copy(source.with_name(source.name + suffix), folder)
    expected = content(journal)
    journal.close()
    assert (folder / f"{JOURNAL_FILE}-wal").stat().st_size > 10 * FRAME_BYTES
    assert (folder / JOURNAL_FILE).stat().st_size > 10 * PAGE_BYTES
    return Killed(folder, expected, older)


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


@pytest.mark.parametrize(("suffix", "unit"), [("", PAGE_BYTES), ("-wal", FRAME_BYTES)])
def test_a_flipped_bit_is_noticed_or_changes_nothing(killed: Killed, tmp_path: Path, suffix: str, unit: int) -> None:
    """Three places in every page, one of them in its header; and every byte of the file's own header."""
    rng = random.Random(1)
    pages = (killed.folder / f"{JOURNAL_FILE}{suffix}").stat().st_size // unit
    places = [page * unit + rng.randrange(below) for page in range(pages) for below in (unit, unit, 40)]
    refused = 0
    for place in [*places, *range(100 if not suffix else 32)]:
        path = killed.copy(tmp_path)
        flip(path.with_name(path.name + suffix), place, 1 << rng.randrange(8))
        refused += is_refused(path, killed.content) is not None
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert refused > len(places) // 4


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
    if column in ("checksum", "payload", "value", "key", "name"):
        return f"CAST({column} || 'x' AS {'BLOB' if column in ('checksum', 'payload') else 'TEXT'})"
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


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_truncated_file_is_refused_wherever_it_ends(killed: Killed, tmp_path: Path, suffix: str) -> None:
    size = (killed.folder / f"{JOURNAL_FILE}{suffix}").stat().st_size
    rng = random.Random(2)
    for number, end in enumerate([0, 1, 100, PAGE_BYTES, size - 1, *(rng.randrange(size) for _ in range(20))]):
        path = killed.copy(tmp_path / str(number))
        with path.with_name(path.name + suffix).open("r+b") as file:
            file.truncate(end)
        reason = is_refused(path, killed.content)
        if suffix:
            assert reason, end


def test_a_write_ahead_log_that_was_removed_is_missed(killed: Killed, tmp_path: Path) -> None:
    path = killed.copy(tmp_path)
    path.with_name(path.name + "-wal").unlink()
    reason = is_refused(path, killed.content)
    assert reason is not None
    assert "its write-ahead log is damaged or missing" in reason
    (tmp_path / f"{JOURNAL_FILE}.commits").unlink()  # as the message says: accept the loss
    with closing(Journal(path)) as shorter:
        assert content(shorter) != killed.content


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
    assert "has schema 99, and this version of asyncrl reads schema 2" in reason
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
            write_steps(journal, 3, 3)
        assert is_disk_full(caught.value)
    with closing(Journal(path)) as journal:
        assert [s for s in live(journal) if s.ticket_id >= 30]
        assert content(journal)["groups"].items() >= expected["groups"].items()


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    """SQLite calls it an I/O error."""
    path = tmp_path / JOURNAL_FILE
    with closing(Journal(path)) as journal:
        write_steps(journal, 1, 1)
        with file_size_limit(journal.file_bytes + 3 * PAGE_BYTES):
            with pytest.raises(BadStateError, match="File too large") as caught:
                write_steps(journal, 2, 2)
            assert is_disk_full(caught.value)
            reason = describe_full_disk(caught.value, tmp_path)
            assert f"a file in {tmp_path} is as large as this process may make it" in reason
            assert "Raise the limit and continue with --resume" in reason
        before = content(journal)
    assert is_refused(path, before) is None
