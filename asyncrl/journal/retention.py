"""Which groups stay in the journal though no restart needs them: those of the newest steps, for who wants to look."""

from __future__ import annotations

import sqlite3


class SavedSteps:
    """Steps that a checkpoint holds and whose groups are there nevertheless, oldest first."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db
        self._bytes: dict[int, int] = {}
        """Of the groups, by step."""
        self._last = 0

    def add_until(self, step: int) -> None:
        """A checkpoint of `step` is safe."""
        self._bytes |= self._db.execute(
            "SELECT step, SUM(length) FROM consumption JOIN groups USING (ticket_id) WHERE step > ? AND step <= ? "
            "GROUP BY step ORDER BY step",
            (self._last, step),
        ).fetchall()
        self._last = max(step, self._last)

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def first(self) -> int:
        """The first step that the journal has the groups of."""
        return next(iter(self._bytes), self._last + 1)

    def beyond(self, room: int) -> tuple[int, int] | None:
        """First and last of the steps that do not fit into `room` bytes together with all later ones."""
        for step, size in reversed(self._bytes.items()):
            room -= size
            if room < 0:
                return self.first, step
        return None

    def remove_until(self, step: int) -> None:
        self._bytes = {number: size for number, size in self._bytes.items() if number > step}
