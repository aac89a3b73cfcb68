"""The journal's SQLite file: its tables and their rows, how it is opened, and what its errors mean."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.run_sections import Durability
from asyncrl.errors import BadStateError
from asyncrl.journal.full_disk import find_no_room, is_disk_full
from protocol.messages import PROTOCOL_MAJOR

SCHEMA = 6
"""Kept as SQLite's user_version. Raised by changes that make older journals unreadable."""
PAGE_BYTES = 4096
TRANSACTION_BYTES = 5 * PAGE_BYTES
"""Rough growth of the write-ahead log per transaction."""
LOG_BYTES = 16 << 20
"""Added to the write-ahead log before it is copied into the file, beside the writing."""
LONGEST_LOG_BYTES = 4 * LOG_BYTES
"""A log that grows faster than it can be copied is copied by the writer, which then waits."""
WAY_OUT = (
    "Restore it from a backup, or start a new run from the newest checkpoint's model "
    "(asyncrl export RUN TARGET, then model.path=TARGET)"
)

_SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE ledger (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tickets (
    ticket_id INTEGER PRIMARY KEY, position INTEGER NOT NULL UNIQUE, version INTEGER NOT NULL, bound INTEGER NOT NULL);
CREATE TABLE groups (
    ticket_id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    checksum BLOB NOT NULL);
CREATE TABLE consumption (
    position INTEGER PRIMARY KEY, ticket_id INTEGER NOT NULL UNIQUE, version INTEGER NOT NULL,
    bound INTEGER NOT NULL, step INTEGER NOT NULL);
CREATE INDEX consumption_by_step ON consumption (step);
CREATE TABLE replayed (step INTEGER NOT NULL, ticket_id INTEGER NOT NULL, PRIMARY KEY (step, ticket_id)) WITHOUT ROWID;
CREATE TABLE again (position INTEGER PRIMARY KEY);
CREATE TABLE filtered (
    position INTEGER PRIMARY KEY, ticket_id INTEGER NOT NULL UNIQUE, version INTEGER NOT NULL, bound INTEGER NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE prompt_source (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
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


SLOT = "ticket_id, position, version, bound"
"""Columns of a TicketSlot, in the tables `tickets`, `consumption` and `filtered`."""
DROPPED = "dropped_"
"""First part of the names of the counters of dropped groups; the reason follows."""
STALE = "dropped_stale"
"""Counter of the dropped groups whose positions are issued again."""


@dataclass(frozen=True)
class JournalState:
    """The unfinished work in a journal, for a learner that starts."""

    counters: dict[str, int]
    waiting: tuple[TicketSlot, ...]
    """Tickets that were issued and have no group."""
    buffered: tuple[TicketSlot, ...]
    """Tickets whose groups are kept and not consumed."""
    again: tuple[int, ...]
    """Positions whose group was dropped and that must be issued again."""
    last_step: int
    """The newest step whose groups have been taken; 0 if none."""
    prompt_source: dict[str, float]
    """State of the prompt source."""


def open_database(path: Path, durability: Durability, *, begun: bool) -> sqlite3.Connection:
    """Open for every thread. A file that is not `begun` gets its tables."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
    db.execute(f"PRAGMA wal_autocheckpoint = {LONGEST_LOG_BYTES // PAGE_BYTES}")
    db.execute("PRAGMA cell_size_check = ON")
    # Some builds overwrite what is deleted, at three times the cost; nothing here is secret.
    db.execute("PRAGMA secure_delete = OFF")
    if not begun:
        empty = "INSERT INTO seal VALUES (0, 0, zeroblob(8));"
        db.executescript(f"BEGIN; {_TABLES} {empty} PRAGMA user_version = {SCHEMA}; COMMIT;")
    return db


def schema_problem(schema: int) -> str:
    """Reason that a journal of this schema is refused, as the end of a sentence, and the way out; empty: it is read."""
    if schema == SCHEMA:
        return ""
    return (
        f"has schema {schema}, and this version of asyncrl reads schema {SCHEMA} (protocol {PROTOCOL_MAJOR}). "
        "Go on with the version of asyncrl that wrote it"
    )


@contextmanager
def explain_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what goes wrong into a BadStateError that says whether anything is lost, and the way out."""
    try:
        yield
    # OSError: of the groups' files. UnicodeDecodeError: SQLite quotes a damaged text.
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        problem = find_no_room(error, path) or error
        reason = problem.strerror if isinstance(problem, OSError) else problem
        after = "Nothing is lost" if is_disk_full(problem) else WAY_OUT
        raise BadStateError(f"{doing} the journal {path}: {reason}. {after}") from problem
