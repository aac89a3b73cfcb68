"""The journal's SQLite file: its tables and their rows, how it is opened, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.run_sections import Durability
from asyncrl.errors import BadStateError
from asyncrl.journal.data_files import PLACE, Place, data_file_path, read_place, unpack_group
from asyncrl.journal.full_disk import find_no_room, is_disk_full
from protocol.messages import PROTOCOL_MAJOR, Group

SCHEMA = 8
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
    ticket_id INTEGER PRIMARY KEY, data_file INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
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
    """Open for every thread. A file that is not `begun` gets its tables. A new one is this user's alone, as it has the
    settings of the environment; SQLite gives its other files the same rights."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
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


_KEPT = "JOIN groups USING (ticket_id)"
_BATCHES = "(SELECT step, ticket_id FROM consumption UNION ALL SELECT step, ticket_id FROM replayed)"


class JournalView:
    """Reads an open journal. Every method raises BadStateError where the file is damaged."""

    path: Path
    _db: sqlite3.Connection

    def consumed(self, step: int) -> tuple[TicketSlot, ...]:
        """The groups taken for `step`, in the order of the batch, which `replayed` ones end."""
        return self._slots("consumption WHERE step = ?", step)

    def replayed(self, step: int) -> tuple[TicketSlot, ...]:
        """The groups that `step` trained once more."""
        return self._slots("replayed JOIN consumption USING (ticket_id) WHERE replayed.step = ?", step)

    def replayable(self, version: int) -> tuple[TicketSlot, ...]:
        """The consumed and kept groups that may be within their bounds at `version`, by when they were consumed."""
        return self._slots(f"consumption {_KEPT} WHERE step - 1 + bound >= ?", version)

    def _slots(self, rest: str, *values: int) -> tuple[TicketSlot, ...]:
        rows = self._rows(f"SELECT {SLOT} FROM {rest} ORDER BY ticket_id", values)
        return tuple(TicketSlot(*row) for row in rows)

    def group(self, ticket_id: int) -> Group:
        """Return a group. Raises BadStateError if it is not kept (any more) or damaged."""
        group = self.find_group(ticket_id)
        if group is None:
            raise BadStateError(f"{self.path}: the group of ticket {ticket_id} is not kept, or damaged. {WAY_OUT}")
        return group

    def find_group(self, ticket_id: int) -> Group | None:
        """Return a group; None if it is not kept (any more), or its bytes are not those that were written."""
        rows = self._rows(f"SELECT {PLACE} FROM groups WHERE ticket_id = ?", (ticket_id,))
        if not rows:
            return None
        place = Place(*rows[0])
        try:
            with data_file_path(self.path, place.data_file).open("rb") as data_file:
                payload = read_place(data_file.fileno(), place)
        except FileNotFoundError:  # forgotten since
            return None
        return None if payload is None else unpack_group(payload)

    def lost_in(self, ticket_id: int) -> Path | None:
        """Return the data file of a group that `find_group` did not find; None if the journal names none for it."""
        rows = self._rows("SELECT data_file FROM groups WHERE ticket_id = ?", (ticket_id,))
        return data_file_path(self.path, rows[0][0]) if rows else None

    def kept(self) -> dict[int, int]:
        """Ticket -> step of the kept groups that a step has taken."""
        return dict(self._rows(f"SELECT ticket_id, step FROM consumption {_KEPT}"))

    def kept_steps(self) -> dict[int, int]:
        """Step -> number of its groups that are kept."""
        return dict(self._rows(f"SELECT step, COUNT(*) FROM {_BATCHES} {_KEPT} GROUP BY step ORDER BY step"))

    def consumed_by_step(self) -> dict[int, int]:
        """Step -> number of groups that it took, and trained once more."""
        return dict(self._rows(f"SELECT step, COUNT(*) FROM {_BATCHES} GROUP BY step"))

    def first_step_not_kept(self, after: int) -> int | None:
        """The first step after `after` of which a group is not kept any more; None where all of them are."""
        lost = f"{_BATCHES} LEFT JOIN groups USING (ticket_id) WHERE groups.ticket_id IS NULL AND step > ?"
        return self._rows(f"SELECT MIN(step) FROM {lost}", (after,))[0][0]

    def filtered(self) -> dict[int, str]:
        """Position -> reason of the groups that a filter has dropped."""
        return dict(self._rows("SELECT position, reason FROM filtered ORDER BY position"))

    def last_step(self) -> int:
        """The newest step whose groups have been taken; 0 if none."""
        return self._rows("SELECT COALESCE(MAX(step), 0) FROM consumption")[0][0]

    def meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def _rows(self, query: str, values: Iterable[int | str] = ()) -> list[tuple]:
        """All rows at once: a reader that stops half-way keeps the learner from copying its log."""
        with explain_errors("reading", self.path):
            return self._db.execute(query, tuple(values)).fetchall()


class JournalReader(JournalView):
    """A view for programs that only look, for one thread at a time. Nothing is changed or locked."""

    def __init__(self, path: Path, *, untouched: bool = False):
        """`untouched`: SQLite creates no files beside the journal; requires that no process writes it meanwhile."""
        self.path = path
        self._db = sqlite3.connect(
            read_only_uri(path, untouched), uri=True, isolation_level=None, check_same_thread=False
        )
        if problem := schema_problem(self._rows("PRAGMA user_version")[0][0]):
            raise BadStateError(f"{path} {problem}. {WAY_OUT}")

    @property
    def changes(self) -> int:
        """A number that changes with every write of the journal."""
        return self._rows("PRAGMA data_version")[0][0]

    def close(self) -> None:
        self._db.close()


def read_only_uri(path: Path, untouched: bool = False) -> str:
    """SQLite's address of a file to read. Untouched, too, where nothing can be written: the run may be an archive."""
    log = path.with_name(path.name + "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    immutable = not has_log and (untouched or not os.access(path.parent, os.W_OK))
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
