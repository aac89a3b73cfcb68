"""The journal: what the learner knows about every ticket, on disk before anybody is told.

One SQLite file in WAL mode, and the groups' bytes in files beside it (segments.py). A transaction holds the
ticket, group or consumption rows *and* the ledger's counters, and commits after the bytes of its groups were written:
a process that is killed at any moment leaves an account that adds up. The primary key of `consumption` is the
position in the data order: the database itself refuses to train a prompt twice.

Payloads (the groups) are needed until a checkpoint holds their step, and the newest of the others are kept for those
who want to look at them; rows of consumption stay: 40 bytes a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from asyncrl.config.run_sections import Durability
from asyncrl.errors import BadStateError
from asyncrl.journal.database import (
    LOG_BYTES,
    TRANSACTION_BYTES,
    WAY_OUT,
    database_bytes,
    journal_name,
    open_database,
    telling,
)
from asyncrl.journal.digest import CommitMark, ContentDigest
from asyncrl.journal.integrity import check_journal, scalar
from asyncrl.journal.payloads import pack_frames, unpack_group
from asyncrl.journal.retention import SavedSteps
from asyncrl.journal.segments import PLACE, Place, Segments
from asyncrl.journal.state import JournalState, TicketSlot
from asyncrl.journal.wal_checkpointer import WalCheckpointer
from protocol.codec import Frame
from protocol.faults import crash_point
from protocol.messages import Group

JOURNAL_FILE = "journal.sqlite"


class Journal:
    """Not thread-safe: the ledger's lock guards it. `path` None keeps it in memory (tests, simulations).

    Every method raises BadStateError when the file is damaged or the disk is full.
    """

    def __init__(self, path: Path | None, durability: Durability = "process", *, saved_step: int = 0):
        """A checkpoint of `saved_step` is safe: the groups up to it may be damaged or missing."""
        self.path = path
        self._mark = CommitMark(path) if path else None
        self._copier = WalCheckpointer(path, before=lambda: self._segments.sync()) if path else None
        self._uncopied_bytes = 0
        self._syncs_groups = durability == "power"
        self._arrived: list[tuple[int, Sequence[bytes | memoryview]]] = []
        """Groups of this transaction, in pieces."""
        self._forgotten: list[Place] = []
        """By this transaction."""
        try:
            with telling("opening", self.path):
                begun = path is not None and self._mark is not None and check_journal(path, self._mark, saved_step)
                self._db = open_database(path, durability, begun=begun)
                self._commits, digest = self._db.execute("SELECT commits, digest FROM seal").fetchone()
                self._digest = ContentDigest(int.from_bytes(digest, "little"))
                self._segments = Segments(
                    path, (Place(*row) for row in self._db.execute(f"SELECT {PLACE} FROM groups"))
                )
                self._saved = SavedSteps(self._db)
                self._saved.add_until(saved_step)
            if self._segments.obsolete:
                self.flush()  # a process that was killed left them: the transaction that forgot them must stay
                self._delete_obsolete()
        except BaseException:
            if self._mark:
                self._mark.close()
            raise

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. What was written is durable, to the degree of `durability`, on return."""
        before = self._digest.value
        with telling("writing", self.path):
            if self._copier is not None:
                self._copier.check()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                places = self._write_groups() if self._arrived else []
                self._db.execute(
                    "UPDATE seal SET commits = ?, digest = ?", (self._commits + 1, self._digest.to_bytes())
                )
                self._db.execute("COMMIT")
            except BaseException:
                self._digest.value = before
                self._arrived, self._forgotten = [], []
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._segments.cut()
                raise
        self._commits += 1
        if self._mark:
            self._mark.write(self._commits)
        self._segments.settle(places, self._forgotten)
        self._arrived, self._forgotten = [], []
        self._copy_log()

    def _write_groups(self) -> list[Place]:
        """The bytes first, then the rows that name them."""
        places = self._segments.append([pieces for _, pieces in self._arrived])
        if self._syncs_groups:
            self._segments.sync()
        crash_point("journal.segment_written")
        rows = [(ticket_id, *place) for (ticket_id, _), place in zip(self._arrived, places, strict=True)]
        self._db.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?)", rows)
        self._digest.add("groups", rows)
        return places

    def _copy_log(self) -> None:
        """Now and then, and where files wait to be deleted."""
        self._uncopied_bytes += TRANSACTION_BYTES
        obsolete = self._segments.obsolete
        if self._copier is None or not (obsolete or self._uncopied_bytes >= LOG_BYTES):
            return
        self._uncopied_bytes = 0
        self._segments.obsolete = []
        self._copier.copy_soon(then_delete=obsolete)

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
        if self._scalar("SELECT EXISTS (SELECT 1 FROM again)"):  # seldom
            for slot in slots:
                if self._db.execute("DELETE FROM again WHERE position = ?", (slot.position,)).rowcount:
                    self._digest.remove("again", [(slot.position,)])

    def add_group(self, ticket_id: int, frames: Sequence[Frame]) -> None:
        """`frames`: a verified group as it travelled. All groups of a transaction are written at its end."""
        self._arrived.append((ticket_id, pack_frames(frames)))

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

    def forget_payloads(self, step: int, *, keep_bytes: int = 0) -> int:
        """A checkpoint of `step` is safe: no restart will ask for the groups of its steps again. So many bytes of the
        newest of them stay nevertheless, in whole steps. Returns the first step whose groups are there.
        """
        with telling("reading", self.path):
            self._saved.add_until(step)
        if beyond := self._saved.beyond(keep_bytes):
            with self.transaction():
                taken = "SELECT ticket_id FROM consumption WHERE step BETWEEN ? AND ?"
                self._remove_payloads(f"ticket_id IN ({taken})", [beyond])
            self._saved.remove_until(beyond[1])
        return self._saved.first

    def sync_groups(self) -> None:
        """Their bytes to the disk. May run beside all other methods: there may be much to write."""
        with telling("flushing", self.path):
            self._segments.sync()

    def flush(self) -> None:
        """Copy the write-ahead log into the file, and it and the groups to the disk."""
        with telling("flushing", self.path), self._copier.paused() if self._copier is not None else nullcontext():
            self._segments.sync()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _delete_obsolete(self) -> None:
        for path in self._segments.obsolete:
            path.unlink(missing_ok=True)
        self._segments.obsolete = []

    def _remove_payloads(self, where: str, parameters: Iterable[tuple[int, ...]]) -> None:
        for values in parameters:
            removed = self._db.execute(
                f"DELETE FROM groups WHERE {where} RETURNING ticket_id, {PLACE}", values
            ).fetchall()
            self._forgotten += [Place(*row[1:]) for row in removed]
            self._digest.remove("groups", removed)

    # --- reading ------------------------------------------------------------------------------------

    def state(self) -> JournalState:
        with telling("reading", self.path):
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
        with telling("reading", self.path):
            return self._slots("consumption WHERE step = ? ORDER BY ticket_id", (step,))

    def group(self, ticket_id: int) -> Group:
        with telling("reading", self.path):
            row = self._db.execute(f"SELECT {PLACE} FROM groups WHERE ticket_id = ?", (ticket_id,)).fetchone()
            payload = self._segments.read(Place(*row)) if row is not None else None
        if row is None:
            raise BadStateError(f"{journal_name(self.path)}: the group of ticket {ticket_id} is missing. {WAY_OUT}")
        if payload is None:
            raise BadStateError(
                f"{journal_name(self.path)}: the group of ticket {ticket_id} is damaged (checksum). {WAY_OUT}"
            )
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
    def payload_bytes(self) -> int:
        """Of the groups that are there."""
        return self._segments.live_bytes

    @property
    def needed_bytes(self) -> int:
        """Of the groups that a restart needs, since no checkpoint holds their steps."""
        return self.payload_bytes - self._saved.total_bytes

    @property
    def file_bytes(self) -> int:
        """Of the file, its write-ahead log and the files of groups."""
        return database_bytes(self.path) + self._segments.file_bytes

    def close(self) -> None:
        if self._copier is not None:
            self._segments.obsolete += self._copier.close()
        self._db.close()  # which copies what is left of the log
        self._segments.close()
        self._delete_obsolete()
        if self._mark:
            self._mark.close()

    def _slots(self, rest: str, values: tuple[int, ...] = ()) -> tuple[TicketSlot, ...]:
        rows = self._db.execute(f"SELECT ticket_id, position, version, bound FROM {rest}", values)
        return tuple(TicketSlot(*row) for row in rows)

    def _scalar(self, query: str, values: tuple[int | str, ...] = ()) -> int:
        return scalar(self._db, query, values)


def _ticket_rows(slots: Sequence[TicketSlot]) -> list[tuple[int, int, int, int]]:
    return [(s.ticket_id, s.position, s.version, s.bound) for s in slots]
