"""Read access to a journal, for the learner that writes it and for tools."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from asyncrl.errors import BadStateError
from asyncrl.journal.database import SLOT, WAY_OUT, TicketSlot, explain_errors, schema_problem
from asyncrl.journal.segments import PLACE, Place, read_place, segment_path, unpack_group
from protocol.messages import Group

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
            with segment_path(self.path, place.segment).open("rb") as segment:
                payload = read_place(segment.fileno(), place)
        except FileNotFoundError:  # forgotten since
            return None
        return None if payload is None else unpack_group(payload)

    def lost_in(self, ticket_id: int) -> Path | None:
        """Return the segment file of a group that `find_group` did not find; None if the journal names none for it."""
        rows = self._rows("SELECT segment FROM groups WHERE ticket_id = ?", (ticket_id,))
        return segment_path(self.path, rows[0][0]) if rows else None

    def kept(self) -> dict[int, int]:
        """Ticket -> step of the kept groups that a step has taken."""
        return dict(self._rows(f"SELECT ticket_id, step FROM consumption {_KEPT}"))

    def kept_steps(self) -> dict[int, int]:
        """Step -> number of its groups that are kept."""
        return dict(self._rows(f"SELECT step, COUNT(*) FROM {_BATCHES} {_KEPT} GROUP BY step ORDER BY step"))

    def consumed_by_step(self) -> dict[int, int]:
        """Step -> number of groups that it took, and trained once more."""
        return dict(self._rows(f"SELECT step, COUNT(*) FROM {_BATCHES} GROUP BY step"))

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
