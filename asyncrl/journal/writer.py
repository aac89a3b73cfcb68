"""The journal writer: persists every training ticket before it is sent, and its group before it is acknowledged.

One SQLite file in WAL mode, and the groups' bytes in files beside it (data_files.py). A transaction holds the
ticket, group or consumption rows *and* the ledger's counters, and commits after the bytes of its groups were written:
a process that is killed at any moment leaves an account that adds up. The primary key of `consumption` is the
position in the data order: the database itself refuses to train a prompt twice. That a step has trained a consumed
group once more, from the replay buffer, is a row of its own.

Payloads (the groups) are needed until a checkpoint holds their step, and the newest of the others are kept for
inspection; rows of consumption stay: 40 bytes a group.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from asyncrl.config.run_sections import Durability
from asyncrl.journal.data_files import PLACE, DataFiles, Place, pack_frames
from asyncrl.journal.database import (
    LOG_BYTES,
    TRANSACTION_BYTES,
    JournalState,
    JournalView,
    TicketSlot,
    explain_errors,
    open_database,
)
from asyncrl.journal.integrity import CommitMark, ContentDigest, check_journal
from protocol.codec import Frame
from protocol.faults import crash_point
from protocol.messages import Group


class WalCheckpointer:
    """Copies in the background. `copy_soon` never waits; an error is raised by the next `check`."""

    def __init__(self, journal: Path, files: DataFiles):
        self._journal = journal
        self._files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal-log")
        self._copies: deque[Future[None]] = deque()

    def copy_soon(self) -> None:
        self._copies.append(self._thread.submit(self._copy, "PASSIVE"))

    def check(self) -> None:
        """Raises what stopped the copying: a full disk, an unreadable file."""
        while self._copies and self._copies[0].done():
            self._copies[0].result()
            self._copies.popleft()

    def copy_all(self) -> None:
        """Empty the log."""
        self._thread.submit(self._copy, "TRUNCATE").result()

    def close(self) -> None:
        """Wait for a copy that is under way."""
        self._thread.shutdown(cancel_futures=True)

    def _copy(self, mode: str) -> None:
        """Copy as far as the log reaches now. It starts again from its beginning once all of it is copied."""
        obsolete = list(self._files.obsolete)  # by transactions that are in the log by now
        self._files.sync()  # what the rows name: the file without its log is whole, too
        with closing(sqlite3.connect(self._journal, isolation_level=None)) as db:
            busy, pages, copied = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        if busy or copied < pages:  # a reader of the log holds it up
            return
        for path in obsolete:
            path.unlink(missing_ok=True)
            self._files.obsolete.remove(path)


class Journal(JournalView):
    """The writing side. Not thread-safe: the ledger's lock guards it.

    Every method raises BadStateError when the file is damaged or the disk is full.
    """

    def __init__(self, path: Path, durability: Durability = "process", *, saved_step: int = 0):
        """`saved_step`: step of the newest checkpoint; groups of steps up to it may be damaged or missing."""
        self.path = path
        self._mark = CommitMark(path)
        self._uncopied_bytes = 0
        self._syncs_groups = durability == "power"
        self._arrived: list[tuple[int, Sequence[bytes | memoryview]]] = []
        """Groups of this transaction, in pieces."""
        self._forgotten: list[Place] = []
        """Places of the groups that this transaction removes."""
        try:
            with explain_errors("opening", path):
                self._db = open_database(path, durability, begun=check_journal(path, self._mark, saved_step))
                self._commits, digest = self._db.execute("SELECT commits, digest FROM seal").fetchone()
                self._digest = ContentDigest(int.from_bytes(digest, "little"))
                self._files = DataFiles(path, (Place(*row) for row in self._rows(f"SELECT {PLACE} FROM groups")))
                self._copier = WalCheckpointer(path, self._files)
                self._saved_step = saved_step
                self._saved_bytes = sum(size for _, size in self._sizes_of_saved_steps())
            if self._files.obsolete:
                self.flush()  # a process that was killed left them: the transaction that forgot them must stay
        except BaseException:
            self._mark.close()
            raise

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a transaction, all or nothing; on return it is durable as `durability` says."""
        before = self._digest.value
        with explain_errors("writing", self.path):
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
                self._files.cut()
                raise
        self._commits += 1
        self._mark.write(self._commits)
        is_obsolete = self._files.settle(places, self._forgotten)
        self._arrived, self._forgotten = [], []
        self._uncopied_bytes += TRANSACTION_BYTES
        if is_obsolete or self._uncopied_bytes >= LOG_BYTES:
            self._uncopied_bytes = 0
            self._copier.copy_soon()

    def _write_groups(self) -> list[Place]:
        """Write the bytes first, then the rows that name them."""
        places = self._files.append([pieces for _, pieces in self._arrived])
        if self._syncs_groups:
            self._files.sync()
        crash_point("journal.data_file_written")
        rows = [(ticket_id, *place) for (ticket_id, _), place in zip(self._arrived, places, strict=True)]
        self._insert("groups", rows)
        return places

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
        """Record issued tickets, and remove their positions from the list of those to issue again."""
        self._insert("tickets", _ticket_rows(slots))
        if self._db.execute("SELECT EXISTS (SELECT 1 FROM again)").fetchone()[0]:  # seldom
            for slot in slots:
                if self._db.execute("DELETE FROM again WHERE position = ?", (slot.position,)).rowcount:
                    self._digest.remove("again", [(slot.position,)])

    def add_group(self, ticket_id: int, frames: Sequence[Frame]) -> None:
        """Add a verified group's wire frames; they are written when the transaction ends."""
        self._arrived.append((ticket_id, pack_frames(frames)))

    def drop_tickets(self, slots: Sequence[TicketSlot]) -> None:
        """Remove tickets and their groups; their positions will be issued again."""
        self._remove_tickets(slots)
        for slot in slots:
            self._remove_payloads("ticket_id = ?", slot.ticket_id)
        self._insert("again", [(s.position,) for s in slots])

    def filter_out(self, reasons: Mapping[TicketSlot, str]) -> None:
        """Remove tickets and, where they are kept, their groups; their positions will not be issued again."""
        self._insert("filtered", [(s.position, s.ticket_id, s.version, s.bound, r) for s, r in reasons.items()])
        self._remove_tickets(list(reasons))
        for slot in reasons:
            self._remove_payloads("ticket_id = ?", slot.ticket_id)

    def set_prompt_source(self, entries: Mapping[str, float]) -> None:
        """Write these entries of the prompt source's state, and leave the others as they are."""
        for key, value in entries.items():
            before = self._rows("SELECT key, value FROM prompt_source WHERE key = ?", (key,))
            self._digest.remove("prompt_source", before)
            self._db.execute("INSERT OR REPLACE INTO prompt_source VALUES (?, ?)", (key, float(value)))
            self._digest.add("prompt_source", [(key, float(value))])

    def consume(self, step: int, slots: Sequence[TicketSlot]) -> None:
        """Record the groups as the batch of `step`."""
        self._insert("consumption", [(s.position, s.ticket_id, s.version, s.bound, step) for s in slots])
        self._remove_tickets(slots)

    def replay(self, step: int, slots: Sequence[TicketSlot]) -> None:
        """Record groups that `step` trains besides those that it consumes: steps before it have consumed them."""
        self._insert("replayed", [(step, slot.ticket_id) for slot in slots])

    def set_meta(self, **values: str) -> None:
        """Store key-value metadata; each key can be written once."""
        with self.transaction():
            self._insert("meta", list(values.items()))

    def _insert(self, table: str, rows: Sequence[tuple[int | str | bytes, ...]]) -> None:
        if rows:
            self._db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            self._digest.add(table, rows)

    def _remove_tickets(self, slots: Sequence[TicketSlot]) -> None:
        self._db.executemany("DELETE FROM tickets WHERE ticket_id = ?", [(s.ticket_id,) for s in slots])
        self._digest.remove("tickets", _ticket_rows(slots))

    def _remove_payloads(self, where: str, *values: int) -> None:
        query = f"DELETE FROM groups WHERE {where} RETURNING ticket_id, {PLACE}"
        removed = self._db.execute(query, values).fetchall()
        self._forgotten += [Place(*row[1:]) for row in removed]
        self._digest.remove("groups", removed)

    # --- room ---------------------------------------------------------------------------------------

    def forget_payloads(self, step: int, *, keep_bytes: int = 0) -> int:
        """Delete the groups of steps up to `step`, which a checkpoint holds, but for the newest `keep_bytes` of them,
        in whole steps. Returns the first step whose groups are kept.
        """
        self._saved_step = max(step, self._saved_step)
        sizes = self._sizes_of_saved_steps()
        first, kept_bytes = self._saved_step + 1, 0
        while sizes and kept_bytes + sizes[-1][1] <= keep_bytes:
            first, size = sizes.pop()
            kept_bytes += size
        if sizes:
            with self.transaction():
                taken = "SELECT ticket_id FROM consumption WHERE step BETWEEN ? AND ?"
                self._remove_payloads(f"ticket_id IN ({taken})", sizes[0][0], sizes[-1][0])
        self._saved_bytes = kept_bytes
        return first

    def _sizes_of_saved_steps(self) -> list[tuple[int, int]]:
        """(step, bytes of its kept groups) of the steps that a checkpoint holds, oldest first."""
        return self._rows(
            "SELECT step, SUM(length) FROM groups CROSS JOIN consumption USING (ticket_id) WHERE step <= ? "
            "GROUP BY step ORDER BY step",
            (self._saved_step,),
        )

    def sync_groups(self) -> None:
        """Bring the groups' bytes to the disk. May run beside all other methods: there may be much to write."""
        with explain_errors("flushing", self.path):
            self._files.sync()

    def flush(self) -> None:
        """Copy the write-ahead log into the file, and it and the groups to the disk."""
        with explain_errors("flushing", self.path):
            self._copier.copy_all()

    @property
    def payload_bytes(self) -> int:
        """Size of all kept groups."""
        return self._files.live_bytes

    @property
    def needed_bytes(self) -> int:
        """Size of the groups that a restart needs, since no checkpoint holds their steps."""
        return self.payload_bytes - self._saved_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file, its write-ahead log and the files of groups."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return self._files.file_bytes + sum(file.stat().st_size for file in files if file.exists())

    # --- reading ------------------------------------------------------------------------------------

    def state(self) -> JournalState:
        have_group = "ticket_id IN (SELECT ticket_id FROM groups)"
        return JournalState(
            counters=dict(self._rows("SELECT name, count FROM ledger")),
            waiting=self._slots(f"tickets WHERE NOT {have_group}"),
            buffered=self._slots(f"tickets WHERE {have_group}"),
            again=tuple(position for (position,) in self._rows("SELECT position FROM again ORDER BY position")),
            last_step=self.last_step(),
            prompt_source=dict(self._rows("SELECT key, value FROM prompt_source")),
        )

    def group(self, ticket_id: int) -> Group:
        with explain_errors("reading", self.path):
            return super().group(ticket_id)

    def close(self) -> None:
        self._copier.close()
        self._db.close()  # which copies what is left of the log
        self._files.close()
        for path in self._files.obsolete:
            path.unlink(missing_ok=True)
        self._mark.close()


def _ticket_rows(slots: Sequence[TicketSlot]) -> list[tuple[int, int, int, int]]:
    return [(s.ticket_id, s.position, s.version, s.bound) for s in slots]
