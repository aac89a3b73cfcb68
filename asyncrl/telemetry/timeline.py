"""Who did what, and when: spans of wall-clock time that become lines of timeline.jsonl.

A line is `{"who": "learner", "what": "saving", "since": ..., "until": ...}`, times in Unix seconds, with more
keys where a span has more to say. The seconds of a learner's steps are not here: they are in metrics.jsonl.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LEARNER = "learner"
MERGED_GAP_S = 0.01
"""Spans of the same activity that are closer than this become one."""
MAX_PENDING = 4096
"""Spans that are kept until they are written; beyond it gaps are closed, the shortest first."""

_Spans = list[tuple[float, float]]


class Timeline:
    """Any thread may add to it; whoever writes the file takes what has come together."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: dict[tuple[str, str], _Spans] = {}
        self._lines: list[dict[str, Any]] = []
        self._taken_until: dict[tuple[str, str], float] = {}

    def ended(self, who: str, what: str, seconds: float, *, ago_s: float = 0.0, **more: Any) -> None:
        """It lasted so long and ended just now, or `ago_s` ago. With `more` to say it stays a line of its own."""
        until = self._clock() - ago_s
        since = until - max(seconds, 0.0)
        with self._lock:
            if more:
                self._lines.append(_line(who, what, since, until) | more)
                return
            spans = self._spans.setdefault((who, what), [])
            spans.append((since, until))
            if len(spans) > MAX_PENDING:
                self._spans[who, what] = _fewer(spans)

    @contextmanager
    def doing(self, who: str, what: str) -> Iterator[None]:
        """From here to the end of the block, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.ended(who, what, time.monotonic() - began)

    def take(self) -> list[dict[str, Any]]:
        """Everything since the last call, in no order. Spans of one activity never overlap."""
        with self._lock:
            spans, lines = self._spans, self._lines
            self._spans, self._lines = {}, []
        for key, pending in spans.items():
            taken = self._taken_until.get(key, 0.0)
            fresh = [(max(since, taken), until) for since, until in pending if until > taken]
            merged = merge(fresh, MERGED_GAP_S)
            lines += [_line(*key, since, until) for since, until in merged]
            if merged:
                self._taken_until[key] = merged[-1][1]
        return lines


def merge(spans: Sequence[tuple[float, float]], gap_s: float = 0.0) -> _Spans:
    """Their union, in order; what is closer than `gap_s` becomes one."""
    merged: _Spans = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


def _fewer(spans: _Spans) -> _Spans:
    """At most half of what may be kept."""
    gap_s = MERGED_GAP_S
    while len(spans := merge(spans, gap_s)) > MAX_PENDING // 2:
        gap_s *= 2
    return spans


def _line(who: str, what: str, since: float, until: float) -> dict[str, Any]:
    return {"who": who, "what": what, "since": round(since, 3), "until": round(until, 3)}
