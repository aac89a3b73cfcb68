"""Time that activities and waits take. Spans of wall-clock time become lines of timeline.jsonl.

A line is `{"who": "learner", "what": "saving", "since": ..., "until": ...}`, times in Unix seconds, with more
keys where a span has details. The seconds of a learner's steps are not here: they are in metrics.jsonl.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

LEARNER = "learner"
MERGED_GAP_S = 0.01
"""Spans of the same activity that are closer than this become one."""
MAX_PENDING = 4096
"""Spans of an activity that are kept until they are written; above it the oldest are forgotten."""


class Timeline:
    """Collects spans from any thread until the writer of the file takes them."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._lock = threading.Lock()
        self._spans = self._no_spans()
        self._lines: list[dict[str, Any]] = []
        self._taken_until: dict[tuple[str, str], float] = {}

    @staticmethod
    def _no_spans() -> dict[tuple[str, str], deque[tuple[float, float]]]:
        return defaultdict(lambda: deque(maxlen=MAX_PENDING))

    def ended(self, who: str, what: str, seconds: float, *, ago_s: float = 0.0, **details: Any) -> None:
        """Add an activity of so many seconds that ended `ago_s` ago. One with details stays a line of its own."""
        until = self._clock() - ago_s
        since = until - max(seconds, 0.0)
        with self._lock:
            if details:
                self._lines.append(_line(who, what, since, until) | details)
                return
            self._spans[who, what].append((since, until))

    @contextmanager
    def doing(self, who: str, what: str) -> Iterator[None]:
        """Add the time of the block, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.ended(who, what, time.monotonic() - began)

    def take(self) -> list[dict[str, Any]]:
        """Lines since the last call, in no order. Spans of one activity never overlap."""
        with self._lock:
            spans, lines = self._spans, self._lines
            self._spans, self._lines = self._no_spans(), []
        for key, pending in spans.items():
            taken = self._taken_until.get(key, 0.0)
            merged = merge([(max(since, taken), until) for since, until in pending if until > taken], MERGED_GAP_S)
            lines += [_line(*key, since, until) for since, until in merged]
            if merged:
                self._taken_until[key] = merged[-1][1]
        return lines


def merge(spans: Iterable[tuple[float, float]], gap_s: float = 0.0) -> list[tuple[float, float]]:
    """The union of spans, in order; spans that are closer than `gap_s` become one."""
    merged: list[tuple[float, float]] = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


def _line(who: str, what: str, since: float, until: float) -> dict[str, Any]:
    return {"who": who, "what": what, "since": round(since, 3), "until": round(until, 3)}


class WaitClock:
    """Sums the seconds that one thread waits, by reason. Any thread may read the totals, during a wait, too."""

    def __init__(self) -> None:
        self._state: tuple[dict[str, float], str, float] = ({}, "", 0.0)
        """Seconds of the waits before, and reason and start (monotonic seconds) of this one; replaced as a whole."""

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Count the block's time. A wait inside another one counts for itself alone."""
        outer = self._state[1]
        self._state = (self.totals(), reason, time.monotonic())
        try:
            yield
        finally:
            self._state = (self.totals(), outer, time.monotonic())

    def totals(self) -> dict[str, float]:
        """Seconds by reason."""
        seconds, reason, since = self._state
        if not reason:
            return seconds
        return {**seconds, reason: seconds.get(reason, 0.0) + time.monotonic() - since}
