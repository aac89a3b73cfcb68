"""Stalls of this process. While it was suspended or blocked no peer was silent: their messages are still unread."""

from __future__ import annotations

SLOWEST_TURN_S = 2.0
"""Longest regular time between two looks for messages, beyond what a look waits for them."""


class Stalls:
    """How far the time between two looks for messages exceeds what is regular: every `heard_at` is moved by it.

    Example:
        stalls = Stalls(wait_s + SLOWEST_TURN_S)
        heard_at += stalls.look(time.monotonic())  # in each turn
    """

    def __init__(self, regular_s: float):
        self._regular_s = regular_s
        self.looked_at = float("inf")
        """Monotonic time of the last look; infinite before the first."""

    def look(self, now: float) -> float:
        """Seconds of a stall since the last look; 0 where there was none."""
        stalled_s = max(0.0, now - self.looked_at - self._regular_s)
        self.looked_at = now
        return stalled_s
