"""The journal for those who only look: beside a learner that writes, or after it. Nothing is changed or locked."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import quote

from asyncrl.errors import BadStateError
from asyncrl.journal.database import SCHEMA, WAY_OUT, telling
from asyncrl.journal.payloads import unpack_group
from asyncrl.journal.segments import PLACE, Place, read_place, segment_path
from asyncrl.journal.state import TicketSlot
from protocol.messages import Group


class JournalReader:
    """For one thread at a time. Every method raises BadStateError where the file is damaged."""

    def __init__(self, path: Path, *, untouched: bool = False):
        """`untouched`: SQLite puts no files beside one that nobody writes. Then nobody may begin to."""
        self.path = path
        self._db = sqlite3.connect(
            read_only_uri(path, untouched), uri=True, isolation_level=None, check_same_thread=False
        )
        with telling("reading", path):
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found != SCHEMA:
            raise BadStateError(f"{path} has schema {found}, and this version of asyncrl reads schema {SCHEMA}")

    def consumed(self, step: int) -> tuple[TicketSlot, ...]:
        """What was taken for `step`, in the order of the batch."""
        return tuple(TicketSlot(*row) for row in self._rows(CONSUMED, (step,)))

    def group(self, ticket_id: int) -> Group:
        """Raises BadStateError where it is not kept (any more)."""
        group = self.find_group(ticket_id)
        if group is None:
            raise BadStateError(f"{self.path}: the group of ticket {ticket_id} is not kept, or damaged. {WAY_OUT}")
        return group

    def find_group(self, ticket_id: int) -> Group | None:
        """None where it is not kept (any more), or where its bytes are not those that were written."""
        for row in self._rows(f"SELECT {PLACE} FROM groups WHERE ticket_id = ?", (ticket_id,)):
            place = Place(*row)
            try:
                fd = os.open(segment_path(self.path, place.segment), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # forgotten since
                return None
            try:
                payload = read_place(fd, place)
            finally:
                os.close(fd)
            return None if payload is None else unpack_group(payload)
        return None

    def lost_in(self, ticket_id: int) -> Path | None:
        """The file that should have a group and has not its bytes. Ask after `find_group` has found none."""
        rows = self._rows("SELECT segment FROM groups WHERE ticket_id = ?", (ticket_id,))
        return segment_path(self.path, rows[0][0]) if rows else None

    def kept(self, ticket_ids: Collection[int]) -> set[int]:
        """Those whose groups are there."""
        places = ", ".join("?" * len(ticket_ids))
        rows = self._rows(f"SELECT ticket_id, segment FROM groups WHERE ticket_id IN ({places})", tuple(ticket_ids))
        there = {number: segment_path(self.path, number).exists() for number in {segment for _, segment in rows}}
        return {ticket_id for ticket_id, segment in rows if there[segment]}

    def kept_after(self, step: int) -> dict[int, tuple[TicketSlot, int | None]]:
        """Groups that are there and were taken by a later step, or by none yet (None), by ticket."""
        rows = self._rows(
            "SELECT c.ticket_id, c.position, c.version, c.bound, c.step FROM consumption AS c "
            "JOIN groups USING (ticket_id) WHERE c.step > ? "
            "UNION ALL SELECT t.ticket_id, t.position, t.version, t.bound, NULL FROM tickets AS t "
            "JOIN groups USING (ticket_id)",
            (step,),
        )
        return {row[0]: (TicketSlot(*row[:4]), row[4]) for row in rows}

    def slot(self, ticket_id: int) -> TicketSlot | None:
        """Of a ticket that was trained, or is to be."""
        columns = "ticket_id, position, version, bound"
        rows = self._rows(
            f"SELECT {columns} FROM consumption WHERE ticket_id = ?1 "
            f"UNION ALL SELECT {columns} FROM tickets WHERE ticket_id = ?1",
            (ticket_id,),
        )
        return TicketSlot(*rows[0]) if rows else None

    def kept_steps(self) -> dict[int, int]:
        """How many groups of each step are there."""
        return dict(
            self._rows(
                "SELECT step, COUNT(*) FROM consumption JOIN groups USING (ticket_id) GROUP BY step ORDER BY step"
            )
        )

    def last_step(self) -> int:
        """The newest step whose groups have been taken; 0 if none."""
        return self._rows("SELECT COALESCE(MAX(step), 0) FROM consumption")[0][0]

    def meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    @property
    def changes(self) -> int:
        """Another number whenever somebody has written."""
        return self._rows("PRAGMA data_version")[0][0]

    def close(self) -> None:
        self._db.close()

    def _rows(self, query: str, values: Iterable[int | str] = ()) -> list[tuple]:
        """All of them at once: whoever stops half-way keeps the learner from copying its log."""
        with telling("reading", self.path):
            return self._db.execute(query, tuple(values)).fetchall()


CONSUMED = "SELECT ticket_id, position, version, bound FROM consumption WHERE step = ? ORDER BY ticket_id"


def read_only_uri(path: Path, untouched: bool = False) -> str:
    """Untouched, too, where nothing can be written: the run may be an archive."""
    log = path.with_name(path.name + "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    immutable = not has_log and (untouched or not os.access(path.parent, os.W_OK))
    return f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if immutable else ''}"
