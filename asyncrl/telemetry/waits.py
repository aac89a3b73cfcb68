"""How long a thread stood still, and for what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class WaitClock:
    """One thread waits, another one may read the totals at any moment, those of the wait that goes on included."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: tuple[str, float] | None = None
        """What for, and since when (monotonic seconds)."""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A wait inside another one counts for itself alone."""
        outer = self._running
        self._switch(what)
        try:
            yield
        finally:
            self._switch(outer[0] if outer else "")

    def _switch(self, what: str) -> None:
        now = time.monotonic()
        if self._running:
            name, since = self._running
            self._seconds[name] = self._seconds.get(name, 0.0) + now - since
        self._running = (what, now) if what else None

    def totals(self) -> dict[str, float]:
        """Seconds by what for."""
        running, totals = self._running, dict(self._seconds)
        if running:
            totals[running[0]] = totals.get(running[0], 0.0) + time.monotonic() - running[1]
        return totals
