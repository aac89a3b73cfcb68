"""The check of a journal before anything is written to it, so that what is damaged stays as it was found.

SQLite checks the shape of its pages but not the values in them, and ends a damaged write-ahead log early, silently. So
every transaction leaves behind a digest of all rows, and a file of its own holds the last commit's number.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import xxhash

from asyncrl.errors import BadStateError
from asyncrl.journal.data_files import PLACE, Place, data_file_path, read_place
from asyncrl.journal.database import DROPPED, STALE, WAY_OUT, schema_problem

_DIGESTED = {
    "meta": "SELECT key, value FROM meta",
    "ledger": "SELECT name, count FROM ledger WHERE count != 0",
    "tickets": "SELECT ticket_id, position, version, bound FROM tickets",
    "groups": "SELECT ticket_id, data_file, offset, length, checksum FROM groups",
    "consumption": "SELECT position, ticket_id, version, bound, step FROM consumption",
    "replayed": "SELECT step, ticket_id FROM replayed",
    "again": "SELECT position FROM again",
    "filtered": "SELECT position, ticket_id, version, bound, reason FROM filtered",
    "prompt_source": "SELECT key, value FROM prompt_source",
}
"""The rows that count. The checksum of a group stands for its payload; a counter of 0 counts like none."""
_SMALLEST_BYTES = 512
"""Size of the smallest SQLite database."""
_WAL_MODE_AT, _WAL_MODE = 18, b"\x02\x02"
"""Versions for writing and reading in the file's header. SQLite silently only reads what needs a newer one to write."""


class ContentDigest:
    """The sum of all rows' hashes, modulo 2^64: it follows every insertion and deletion without reading the rest."""

    def __init__(self, value: int = 0):
        self.value = value

    def add(self, table: str, rows: Iterable[tuple[int | float | str | bytes, ...]]) -> None:
        self.value = (self.value + _sum_of_hashes(table, rows)) % 2**64

    def remove(self, table: str, rows: Iterable[tuple[int | float | str | bytes, ...]]) -> None:
        self.value = (self.value - _sum_of_hashes(table, rows)) % 2**64

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(8, "little")


def _sum_of_hashes(table: str, rows: Iterable[tuple[int | float | str | bytes, ...]]) -> int:
    return sum(xxhash.xxh3_64_intdigest(f"{table}{row!r}".encode()) for row in rows)


class CommitMark:
    """A file of 20 digits next to the journal, written after every commit."""

    def __init__(self, journal: Path):
        self.path = journal.with_name(journal.name + ".commits")
        self.path.touch()
        self._file = self.path.open("r+b", buffering=0)
        self.close = self._file.close

    def read(self) -> int:
        """The number of the last commit; 0 where nothing is written yet."""
        content = os.pread(self._file.fileno(), 64, 0)
        try:
            return int(content) if content else 0
        except ValueError as problem:
            raise BadStateError(
                f"{self.path} should hold the number of the journal's last commit, and holds {content!r}. Restore it "
                "and the journal from a backup; without it the journal cannot be verified"
            ) from problem

    def write(self, commits: int) -> None:
        os.pwrite(self._file.fileno(), b"%020d" % commits, 0)


def check_journal(path: Path, mark: CommitMark, saved_step: int = 0) -> bool:
    """Check a journal without changing it, and return whether one exists. Raises BadStateError with the damage.

    The groups of steps up to `saved_step` are not read: a checkpoint holds them, and there may be many.
    """
    if not path.exists() or not _is_begun(path, mark):
        return False
    if problem := _find_damage(path, mark, saved_step):
        raise BadStateError(f"the journal {path} {problem}. {WAY_OUT}")
    return True


def _is_begun(path: Path, mark: CommitMark) -> bool:
    """False for the empty file of a run that died before its first commit."""
    if mark.read():
        return True
    with closing(_open_read_only(path)) as db:
        return bool(_scalar(db, "SELECT COUNT(*) FROM sqlite_master"))


def _find_damage(path: Path, mark: CommitMark, saved_step: int) -> str | None:
    """Damage to pages, indexes, rows, payloads, the account or the last commit. Raises sqlite3.Error, too."""
    marked = mark.read()  # before the rows: a learner that lives would write it after them
    if (size := path.stat().st_size) < _SMALLEST_BYTES:
        return f"has only {size} bytes"  # and SQLite would remove the write-ahead log of a file that it finds empty
    with path.open("rb") as file:
        if (mode := file.read(100)[_WAL_MODE_AT:][:2]) != _WAL_MODE:
            formats = f"asks for file format {tuple(mode)}, and has been written with {tuple(_WAL_MODE)}"
            return f"is damaged: its header {formats}"
    with closing(_open_read_only(path)) as db:
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("BEGIN")  # one state of the file for all that follows
        if problem := schema_problem(_scalar(db, "PRAGMA user_version")):
            return problem
        problems = [str(row[0]) for row in db.execute("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            return f"is damaged: {'; '.join(problems)}"
        if (commits := _scalar(db, "SELECT commits FROM seal")) < marked:
            return (
                f"ends at commit {commits}, but commit {marked} was made: its write-ahead log is damaged or missing, "
                "or the machine lost power under trainer.durability=process. Acknowledged groups are missing. To "
                f"accept their loss, remove {mark.path}"
            )
        digest = ContentDigest()
        for table, query in _DIGESTED.items():
            digest.add(table, db.execute(query))
        if (digest.to_bytes(),) != db.execute("SELECT digest FROM seal").fetchone():
            return "is damaged: its rows are not those that were written (digest)"
        return _payload_problem(db, path, saved_step) or _account_problem(db)


def _scalar(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that reads the write-ahead log, and does not move it into the file on closing."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)


def _payload_problem(db: sqlite3.Connection, path: Path, saved_step: int) -> str | None:
    """Groups that are missing or not as they were written."""
    saved = "SELECT 1 FROM consumption WHERE consumption.ticket_id = groups.ticket_id AND step <= ?"
    query = f"SELECT ticket_id, {PLACE} FROM groups WHERE NOT EXISTS ({saved}) ORDER BY data_file, offset"
    for number, rows in groupby(db.execute(query, (saved_step,)), key=itemgetter(1)):
        try:
            data_file = data_file_path(path, number).open("rb")
        except FileNotFoundError as missing:
            return f"is damaged: {missing.filename} with its groups is missing"
        with data_file:
            for ticket_id, *place in rows:
                if read_place(data_file.fileno(), Place(*place)) is None:
                    return (
                        f"is damaged: the group of ticket {ticket_id} in {data_file.name} does not have its checksum. "
                        "If the machine lost power under trainer.durability=process, the groups that were acknowledged "
                        f"last are missing; to accept their loss, remove {path}-wal and {path}.commits"
                    )
    return None


def _account_problem(db: sqlite3.Connection) -> str | None:
    """Tickets that the counters do not account for."""
    counters = dict(db.execute("SELECT name, count FROM ledger"))
    issued, trained = counters.get("issued", 0), counters.get("trained", 0)
    by_reason = {name: count for name, count in counters.items() if name.startswith(DROPPED)}
    dropped = sum(by_reason.values())
    tables = ("tickets", "consumption", "filtered")
    live, consumed, filtered = (_scalar(db, f"SELECT COUNT(*) FROM {table}") for table in tables)
    again = by_reason.get(STALE, 0)
    replayed, rows = counters.get("replayed", 0), _scalar(db, "SELECT COUNT(*) FROM replayed")
    trained_before = "replayed JOIN consumption USING (ticket_id) WHERE consumption.step < replayed.step"
    if not replayed == rows == _scalar(db, f"SELECT COUNT(*) FROM {trained_before}"):
        return f"does not add up: {replayed} times a group was replayed, but {rows} are named, or not trained before"
    if issued == trained + dropped + live and consumed == trained and filtered + again == dropped:
        return None
    return (
        f"does not add up: {issued} tickets issued, {trained} trained, {dropped} dropped, of which {again} stale, but "
        f"{live} are live, {consumed} consumed and {filtered} filtered"
    )
