"""How long a server may have a ticket before another one gets it, too: a multiple of what recent groups took.

A server that sends heartbeats may still have lost a ticket, or be wedged. What it has shown is how long groups take:
from the assignment of a ticket, or of a part, to its answer, so that waiting for room, weights and rewards is in it. A
deadline that is too short costs a group that is sampled twice; one that is too long, the learner's time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

from protocol.messages import TicketKind

QUANTILE = 0.95
FACTOR = 3.0
"""Times the quantile: lengths have heavy tails, and a server that takes over another's tickets works twice as much."""
RECENT_GROUPS = 256


class TicketDeadline:
    """Pure arithmetic. Training and evaluation tickets are measured apart: one may be much shorter than the other.

    >>> deadline = TicketDeadline(least_s=30, unmeasured_s=300)
    >>> deadline.seconds(TicketKind.TRAIN)
    300
    >>> for _ in range(20):
    ...     deadline.measure(TicketKind.TRAIN, 25.0)
    >>> deadline.seconds(TicketKind.TRAIN)
    75.0
    """

    def __init__(self, *, least_s: float = 30.0, unmeasured_s: float = 300.0):
        """`least_s`: the smallest deadline; `unmeasured_s`: the deadline until a group of the kind has arrived."""
        self._least_s = least_s
        self._unmeasured_s = unmeasured_s
        self._recent: dict[TicketKind, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_GROUPS))
        self._seconds: dict[TicketKind, float] = {}

    def measure(self, kind: TicketKind, seconds: float) -> None:
        """Take the time from a ticket's assignment to the arrival of its group."""
        recent = self._recent[kind]
        recent.append(seconds)
        high = sorted(recent)[math.ceil(QUANTILE * len(recent)) - 1]
        self._seconds[kind] = max(self._least_s, FACTOR * high)

    def seconds(self, kind: TicketKind) -> float:
        """The deadline of tickets of this kind now."""
        return self._seconds.get(kind, self._unmeasured_s)
