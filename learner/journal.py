"""The journal: what the learner knows about every ticket, on disk before anybody is told.

One SQLite file in WAL mode. A transaction holds the ticket, group or consumption rows *and* the ledger's counters,
so a process that is killed at any moment leaves an account that adds up. The primary key of `consumption` is the
position in the data order: the database itself refuses to train a prompt twice.

Payloads (the groups) are kept until a checkpoint holds their step; rows of consumption stay: 40 bytes a group.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.config.schema import Durability
from asyncrl.errors import BadStateError
from asyncrl.telemetry.failure import find_no_room
from learner.group_payload import pack_frames, unpack_group
from learner.journal_check import SCHEMA, find_damage, is_begun, scalar
from learner.journal_seal import CommitMark, ContentDigest
from learner.write_ahead import LogCopier
from protocol.codec import Frame
from protocol.messages import Group

JOURNAL_FILE = "journal.sqlite"
PAGE_BYTES = 16384
"""Groups are large: bigger pages mean fewer of them per group."""
SMALL_PAGES = 4
"""About what a transaction writes besides groups."""
LOG_BYTES = 64 << 20
"""Added to the write-ahead log before it is copied into the file, beside the writing."""
LONGEST_LOG_BYTES = 4 * LOG_BYTES
"""A log that grows faster than it can be copied is copied by the writer, who then waits."""
MIB = 1 << 20

_SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE ledger (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tickets (
    ticket_id INTEGER PRIMARY KEY, position INTEGER NOT NULL UNIQUE, version INTEGER NOT NULL, bound INTEGER NOT NULL);
CREATE TABLE groups (ticket_id INTEGER PRIMARY KEY, checksum BLOB NOT NULL, payload BLOB NOT NULL);
CREATE TABLE consumption (
    position INTEGER PRIMARY KEY, ticket_id INTEGER NOT NULL UNIQUE, version INTEGER NOT NULL,
    bound INTEGER NOT NULL, step INTEGER NOT NULL);
CREATE INDEX consumption_by_step ON consumption (step);
CREATE TABLE again (position INTEGER PRIMARY KEY);
CREATE TABLE seal (id INTEGER PRIMARY KEY CHECK (id = 0), commits INTEGER NOT NULL, digest BLOB NOT NULL);
"""


@dataclass(frozen=True)
class TicketSlot:
    """A ticket without its prompt: everything that cannot be derived from the data."""

    ticket_id: int
    position: int
    """Place in the data order."""
    version: int
    """The learner's policy version when it was issued."""
    bound: int
    """Staleness bound that it was issued under, in versions."""


@dataclass(frozen=True)
class JournalState:
    """What a learner that starts finds."""

    counters: dict[str, int]
    waiting: tuple[TicketSlot, ...]
    """Issued, and no group of theirs is here."""
    buffered: tuple[TicketSlot, ...]
    """Their groups are here and not consumed."""
    again: tuple[int, ...]
    """Positions whose group was dropped and that must be issued again."""
    last_step: int
    """The newest step whose groups have been taken; 0 if none."""


class Journal:
    """Not thread-safe: the ledger's lock guards it. `path` None keeps it in memory (tests, simulations).

    Every method raises BadStateError when the file is damaged or the disk is full.
    """

    def __init__(self, path: Path | None, durability: Durability = "process"):
        self.path = path
        self._mark = CommitMark(path) if path else None
        self._copier = LogCopier(path) if path else None
        self._uncopied_bytes = 0
        try:
            with self._telling("opening"):
                begun = self._check()
                self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
                self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
                self._db.execute(f"PRAGMA wal_autocheckpoint = {LONGEST_LOG_BYTES // PAGE_BYTES}")
                self._db.execute("PRAGMA cell_size_check = ON")
                # Some builds overwrite what is deleted, at three times the cost; nothing here is secret.
                self._db.execute("PRAGMA secure_delete = OFF")
                if not begun:
                    empty = "INSERT INTO seal VALUES (0, 0, zeroblob(8));"
                    self._db.executescript(f"BEGIN; {_TABLES} {empty} PRAGMA user_version = {SCHEMA}; COMMIT;")
                self._commits, digest = self._db.execute("SELECT commits, digest FROM seal").fetchone()
                self._digest = ContentDigest(int.from_bytes(digest, "little"))
                self.payload_bytes = self._scalar("SELECT COALESCE(SUM(LENGTH(payload)), 0) FROM groups")
        except BaseException:
            if self._mark:
                self._mark.close()
            raise

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. What was written is durable, to the degree of `durability`, on return."""
        before = self._digest.value
        with self._telling("writing"):
            if self._copier is not None:
                self._copier.check()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute(
                    "UPDATE seal SET commits = ?, digest = ?", (self._commits + 1, self._digest.to_bytes())
                )
                self._db.execute("COMMIT")
            except BaseException:
                self._digest.value = before
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self._commits += 1
        if self._mark:
            self._mark.write(self._commits)
        self._uncopied_bytes += SMALL_PAGES * PAGE_BYTES
        if self._copier is not None and self._uncopied_bytes >= LOG_BYTES:
            self._uncopied_bytes = 0
            self._copier.copy_soon()

    def count(self, **deltas: int) -> None:
        """Add to ledger counters."""
        for name, delta in deltas.items():
            (count,) = self._db.execute(
                "INSERT INTO ledger VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET count = count + excluded.count "
                "RETURNING count",
                (name, delta),
            ).fetchone()
            self._digest.remove("ledger", [(name, count - delta)] if count != delta else [])
            self._digest.add("ledger", [(name, count)] if count else [])

    def add_tickets(self, slots: Sequence[TicketSlot]) -> None:
        rows = _ticket_rows(slots)
        self._db.executemany("INSERT INTO tickets VALUES (?, ?, ?, ?)", rows)
        self._digest.add("tickets", rows)
        for slot in slots:
            if self._db.execute("DELETE FROM again WHERE position = ?", (slot.position,)).rowcount:
                self._digest.remove("again", [(slot.position,)])

    def add_group(self, ticket_id: int, frames: Sequence[Frame]) -> None:
        """`frames`: a verified group as it travelled."""
        payload = pack_frames(frames)
        checksum = xxhash.xxh3_64_digest(payload)
        self._db.execute("INSERT INTO groups VALUES (?, ?, ?)", (ticket_id, checksum, payload))
        self._digest.add("groups", [(ticket_id, checksum)])
        self.payload_bytes += len(payload)
        self._uncopied_bytes += len(payload)

    def drop_tickets(self, slots: Sequence[TicketSlot]) -> None:
        """Their groups are not wanted; their positions will be issued again."""
        self._remove_tickets(slots)
        self._remove_payloads("ticket_id = ?", [(s.ticket_id,) for s in slots])
        positions = [(s.position,) for s in slots]
        self._db.executemany("INSERT INTO again VALUES (?)", positions)
        self._digest.add("again", positions)

    def consume(self, step: int, slots: Sequence[TicketSlot]) -> None:
        """These groups are the batch of `step`, now and for ever."""
        rows = [(s.position, s.ticket_id, s.version, s.bound, step) for s in slots]
        self._db.executemany("INSERT INTO consumption VALUES (?, ?, ?, ?, ?)", rows)
        self._digest.add("consumption", rows)
        self._remove_tickets(slots)

    def _remove_tickets(self, slots: Sequence[TicketSlot]) -> None:
        self._db.executemany("DELETE FROM tickets WHERE ticket_id = ?", [(s.ticket_id,) for s in slots])
        self._digest.remove("tickets", _ticket_rows(slots))

    def forget_payloads(self, step: int) -> None:
        """A checkpoint of `step` is safe: nobody will ask for the groups of its steps again."""
        with self.transaction():
            self._remove_payloads(
                "ticket_id IN (SELECT ticket_id FROM consumption WHERE step <= ?)",
                [(step,)],
            )

    def flush(self) -> None:
        """Copy the write-ahead log into the file, and both to the disk."""
        with self._telling("flushing"), self._copier.paused() if self._copier is not None else nullcontext():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove_payloads(self, where: str, parameters: Iterable[tuple[int]]) -> None:
        for values in parameters:
            removed = self._db.execute(
                f"SELECT ticket_id, checksum, LENGTH(payload) FROM groups WHERE {where}", values
            ).fetchall()
            self._db.execute(f"DELETE FROM groups WHERE {where}", values)
            self.payload_bytes -= sum(row[2] for row in removed)
            self._digest.remove("groups", [row[:2] for row in removed])

    # --- reading ------------------------------------------------------------------------------------

    def state(self) -> JournalState:
        with self._telling("reading"):
            have_group = "ticket_id IN (SELECT ticket_id FROM groups)"
            return JournalState(
                counters=dict(self._db.execute("SELECT name, count FROM ledger")),
                waiting=self._slots(f"tickets WHERE NOT {have_group} ORDER BY ticket_id"),
                buffered=self._slots(f"tickets WHERE {have_group} ORDER BY ticket_id"),
                again=tuple(row[0] for row in self._db.execute("SELECT position FROM again ORDER BY position")),
                last_step=self._scalar("SELECT COALESCE(MAX(step), 0) FROM consumption"),
            )

    def consumed(self, step: int) -> tuple[TicketSlot, ...]:
        """What was taken for `step`, in the order of the batch."""
        with self._telling("reading"):
            return self._slots("consumption WHERE step = ? ORDER BY ticket_id", (step,))

    def group(self, ticket_id: int) -> Group:
        with self._telling("reading"):
            row = self._db.execute("SELECT checksum, payload FROM groups WHERE ticket_id = ?", (ticket_id,)).fetchone()
        if row is None:
            raise BadStateError(f"{self._name}: the group of ticket {ticket_id} is missing. {self._way_out}")
        checksum, payload = row
        if xxhash.xxh3_64_digest(payload) != checksum:
            raise BadStateError(f"{self._name}: the group of ticket {ticket_id} is damaged (checksum). {self._way_out}")
        return unpack_group(payload)

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def set_meta(self, **values: str) -> None:
        """Facts that are written once."""
        with self.transaction():
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", list(values.items()))
            self._digest.add("meta", list(values.items()))

    @property
    def file_bytes(self) -> int:
        """Of the file and its write-ahead log."""
        return sum(file.stat().st_size for file in self._files if file.exists())

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        self._db.close()
        if self._mark:
            self._mark.close()

    # --- is it sound? ---------------------------------------------------------------------------------

    def _check(self) -> bool:
        """Whether there is a journal. Raises BadStateError with what is wrong with it, and leaves it as it is."""
        if self.path is None or self._mark is None or not self.path.exists() or not is_begun(self.path, self._mark):
            return False
        if problem := find_damage(self.path, self._mark):
            raise BadStateError(f"{self._name} {problem}. {self._way_out}")
        return True

    @contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            code = getattr(problem, "sqlite_errorcode", 0)
            if code & 0xFF == sqlite3.SQLITE_FULL:
                raise BadStateError(f"{doing} {self._name}: {problem}. Nothing is lost") from problem
            # SQLite tells no other reason for a write that failed, such as a quota.
            if code == sqlite3.SQLITE_IOERR_WRITE and self.path and (full := find_no_room(self._files)):
                raise BadStateError(f"{doing} {self._name}: {full.strerror}. Nothing is lost") from full
            raise BadStateError(f"{doing} {self._name}: {problem}. {self._way_out}") from problem

    @property
    def _files(self) -> tuple[Path, ...]:
        """The database and its write-ahead log."""
        return (self.path, self.path.with_name(self.path.name + "-wal")) if self.path else ()

    @property
    def _name(self) -> str:
        return f"the journal {self.path or 'in memory'}"

    @property
    def _way_out(self) -> str:
        return (
            "Restore it from a backup, or start a new run from the newest checkpoint's model "
            "(asyncrl export RUN TARGET, then model.path=TARGET)"
        )

    def _slots(self, rest: str, values: tuple[int, ...] = ()) -> tuple[TicketSlot, ...]:
        rows = self._db.execute(f"SELECT ticket_id, position, version, bound FROM {rest}", values)
        return tuple(TicketSlot(*row) for row in rows)

    def _scalar(self, query: str, values: tuple[int | str, ...] = ()) -> int:
        return scalar(self._db, query, values)


def _ticket_rows(slots: Sequence[TicketSlot]) -> list[tuple[int, int, int, int]]:
    return [(s.ticket_id, s.position, s.version, s.bound) for s in slots]
