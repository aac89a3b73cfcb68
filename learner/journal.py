"""The journal: what the learner knows about every ticket, on disk before anybody is told.

One SQLite file in WAL mode. A transaction holds the ticket, group or consumption rows *and* the ledger's counters,
so a process that is killed at any moment leaves an account that adds up. The primary key of `consumption` is the
position in the data order: the database itself refuses to train a prompt twice.

Payloads (the groups) are kept until a checkpoint holds their step; rows of consumption stay: 40 bytes a group.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
import zmq

from asyncrl.config.schema import Durability
from asyncrl.errors import BadStateError
from learner.write_ahead import LogCopier
from protocol.codec import Frame, Limits, decode
from protocol.errors import ProtocolError
from protocol.messages import Group

JOURNAL_FILE = "journal.sqlite"
SCHEMA = 2
"""Raised with every change of tables or payloads; a file of another one is refused."""
PAGE_BYTES = 16384
"""Groups are large: bigger pages mean fewer of them per group."""
SMALL_PAGES = 4
"""About what a transaction writes besides groups."""
LOG_BYTES = 64 << 20
"""Added to the write-ahead log before it is copied into the file, beside the writing."""
LONGEST_LOG_BYTES = 4 * LOG_BYTES
"""A log that grows faster than it can be copied is copied by the writer, who then waits."""
MIB = 1 << 20
WORD = 4
"""Bytes of one int32 or float32."""
SHORT = 256
"""Bytes of a frame that is kept as it is."""

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
        self._commits_fd = -1
        self._copier = LogCopier(path) if path is not None else None
        self._uncopied_bytes = 0
        new = path is None or not path.exists()
        with self._telling("opening"):
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {LONGEST_LOG_BYTES // PAGE_BYTES}")
            self._db.execute("PRAGMA cell_size_check = ON")
            self._db.execute("PRAGMA secure_delete = OFF")  # some builds overwrite what is deleted; nothing is secret
            if new:
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
            else:
                self._check()
            self._commits = self._counter("commits")
            self.payload_bytes = self._scalar("SELECT COALESCE(SUM(LENGTH(payload)), 0) FROM groups")
        if path is not None:
            self._open_commit_mark(path, new)

    def _open_commit_mark(self, path: Path, new: bool) -> None:
        """A file with the number of the last commit. SQLite ends a damaged write-ahead log early, without a word."""
        mark = path.with_name(path.name + ".commits")
        self._commits_fd = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        content = os.pread(self._commits_fd, 64, 0)
        marked = 0 if new or not content else int(content)
        if marked > self._commits:
            raise BadStateError(
                f"{path} ends at commit {self._commits}, but commit {marked} was made: its write-ahead log is damaged, "
                "or the machine lost power under trainer.durability=process. Acknowledged groups are missing. Restore "
                f"both files from a backup, or accept the loss by removing {mark}"
            )

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. What was written is durable, to the degree of `durability`, on return."""
        with self._telling("writing"):
            if self._copier is not None:
                self._copier.check()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._commits += 1
                self._set_counter("commits", self._commits)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        if self._commits_fd >= 0:
            os.pwrite(self._commits_fd, b"%020d" % self._commits, 0)
        self._uncopied_bytes += SMALL_PAGES * PAGE_BYTES
        if self._copier is not None and self._uncopied_bytes >= LOG_BYTES:
            self._uncopied_bytes = 0
            self._copier.copy_soon()

    def count(self, **deltas: int) -> None:
        """Add to ledger counters."""
        self._db.executemany(
            "INSERT INTO ledger VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET count = count + excluded.count",
            [(name, delta) for name, delta in deltas.items() if delta],
        )

    def add_tickets(self, slots: Sequence[TicketSlot]) -> None:
        rows = [(s.ticket_id, s.position, s.version, s.bound) for s in slots]
        self._db.executemany("INSERT INTO tickets VALUES (?, ?, ?, ?)", rows)
        self._db.executemany("DELETE FROM again WHERE position = ?", [(s.position,) for s in slots])

    def add_group(self, ticket_id: int, frames: Sequence[Frame]) -> None:
        """`frames`: a verified group as it travelled."""
        payload = pack_frames(frames)
        self._db.execute("INSERT INTO groups VALUES (?, ?, ?)", (ticket_id, xxhash.xxh3_64_digest(payload), payload))
        self.payload_bytes += len(payload)
        self._uncopied_bytes += len(payload)

    def drop_tickets(self, slots: Sequence[TicketSlot]) -> None:
        """Their groups are not wanted; their positions will be issued again."""
        ids = [(s.ticket_id,) for s in slots]
        self._db.executemany("DELETE FROM tickets WHERE ticket_id = ?", ids)
        self._remove_payloads("ticket_id = ?", ids)
        self._db.executemany("INSERT INTO again VALUES (?)", [(s.position,) for s in slots])

    def consume(self, step: int, slots: Sequence[TicketSlot]) -> None:
        """These groups are the batch of `step`, now and for ever."""
        rows = [(s.position, s.ticket_id, s.version, s.bound, step) for s in slots]
        self._db.executemany("INSERT INTO consumption VALUES (?, ?, ?, ?, ?)", rows)
        self._db.executemany("DELETE FROM tickets WHERE ticket_id = ?", [(s.ticket_id,) for s in slots])

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
            self.payload_bytes -= self._scalar(
                f"SELECT COALESCE(SUM(LENGTH(payload)), 0) FROM groups WHERE {where}", values
            )
            self._db.execute(f"DELETE FROM groups WHERE {where}", values)

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
        with self.transaction():
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))

    @property
    def file_bytes(self) -> int:
        """Of the file and its write-ahead log."""
        if self.path is None:
            return 0
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        self._db.close()
        if self._commits_fd >= 0:
            os.close(self._commits_fd)
            self._commits_fd = -1

    # --- is it sound? ---------------------------------------------------------------------------------

    def _check(self) -> None:
        """Format, pages, indexes, payloads and the account. Raises BadStateError with what is wrong."""
        schema = self._scalar("PRAGMA user_version")
        if schema != SCHEMA:
            raise BadStateError(
                f"{self._name} has format {schema}; this version of asyncrl reads format {SCHEMA}. Continue the run "
                "with the version that began it, or start a new run from the newest checkpoint's model"
            )
        problems = [row[0] for row in self._db.execute("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            raise BadStateError(f"{self._name} is damaged: {'; '.join(problems)}. {self._way_out}")
        for ticket_id, checksum, payload in self._db.execute("SELECT ticket_id, checksum, payload FROM groups"):
            if xxhash.xxh3_64_digest(payload) != checksum:
                raise BadStateError(
                    f"{self._name}: the group of ticket {ticket_id} is damaged (checksum). {self._way_out}"
                )
        issued, trained = self._counter("issued"), self._counter("trained")
        dropped = self._scalar("SELECT COALESCE(SUM(count), 0) FROM ledger WHERE name LIKE 'dropped\\_%' ESCAPE '\\'")
        live = self._scalar("SELECT COUNT(*) FROM tickets")
        consumed = self._scalar("SELECT COUNT(*) FROM consumption")
        if issued != trained + dropped + live or consumed != trained:
            raise BadStateError(
                f"{self._name} does not add up: {issued} tickets issued, {trained} trained, {dropped} dropped, "
                f"but {live} are live and {consumed} consumed. {self._way_out}"
            )

    @contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            full = getattr(problem, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            if full and self.path is not None:
                free = shutil.disk_usage(self.path.parent).free
                raise BadStateError(
                    f"{doing} {self._name}: {problem} ({free / MIB:,.0f} MiB free). Nothing is lost: make room in "
                    f"{self.path.parent} and continue with --resume"
                ) from problem
            raise BadStateError(f"{doing} {self._name}: {problem}. {self._way_out}") from problem

    @property
    def _name(self) -> str:
        return f"the journal {self.path or 'in memory'}"

    @property
    def _way_out(self) -> str:
        return (
            "Restore it from a backup, or start a new run from the newest checkpoint's model "
            "(model.path=<run_dir>/checkpoints/<step>/model)"
        )

    def _slots(self, rest: str, values: tuple[int, ...] = ()) -> tuple[TicketSlot, ...]:
        rows = self._db.execute(f"SELECT ticket_id, position, version, bound FROM {rest}", values)
        return tuple(TicketSlot(*row) for row in rows)

    def _counter(self, name: str) -> int:
        return self._scalar("SELECT COALESCE(SUM(count), 0) FROM ledger WHERE name = ?", (name,))

    def _set_counter(self, name: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO ledger VALUES (?, ?)", (name, value))

    def _scalar(self, query: str, values: tuple[int | str, ...] = ()) -> int:
        return int(self._db.execute(query, values).fetchone()[0])


def pack_frames(frames: Sequence[Frame]) -> bytes:
    """All in one piece: their number, their sizes here and in full, their bytes.

    A column that repeats one value (the versions between two updates, a mask without tools) is kept as that value.
    """
    full = [frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame) for frame in frames]
    kept = [full[0], *(_without_repetition(frame) for frame in full[1:])]
    sizes = [size for pair in zip(kept, full, strict=True) for size in (pair[0].nbytes, pair[1].nbytes)]
    return b"".join((struct.pack(f"<I{len(sizes)}Q", len(full), *sizes), *kept))


def _without_repetition(frame: memoryview) -> memoryview:
    """The first WORD bytes of a frame that is nothing but their repetition."""
    if frame.nbytes < SHORT or frame.nbytes % WORD or frame[:WORD] != frame[-WORD:]:
        return frame
    words = np.frombuffer(frame, np.uint32)
    return frame[:WORD] if words.min() == words.max() else frame


def unpack_group(payload: bytes) -> Group:
    """Arrays are views of `payload`, but for the repetitive ones."""
    view = memoryview(payload)
    (count,) = struct.unpack_from("<I", view)
    sizes = struct.unpack_from(f"<{2 * count}Q", view, 4)
    start = 4 + 16 * count
    frames: list[memoryview] = []
    for kept, full in zip(sizes[::2], sizes[1::2], strict=True):
        frame = view[start : start + kept]
        frames.append(frame if kept == full else memoryview(bytes(frame) * (full // WORD)))
        start += kept
    try:
        group = decode(frames, (Group,), Limits(max_message_bytes=sum(sizes[1::2])))
    except ProtocolError as problem:
        raise BadStateError(f"a group in the journal cannot be read by this version of asyncrl: {problem}") from problem
    assert isinstance(group, Group)
    return group
