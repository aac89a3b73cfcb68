"""Which server gets which ticket: the one that is expected to send its group first.

A server decodes so many sequences at once, each at so many tokens a second. As long as it has a place for all that it
holds, another group takes there what its tokens take; from then on groups share the places, and each takes longer in
proportion. Speeds are measured from the groups that come back, queueing included, so that a server which is slower than
it promised gets less, and a fleet of different machines needs no configuration.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from learner.tickets.ticket import PreparedTicket

RECENT_GROUPS = 32
"""Over which a server's speed is taken: one that slows down is noticed within as many groups."""


class ServerSpeeds:
    """Tokens a second of one sequence, by server.

    >>> speeds = ServerSpeeds()
    >>> speeds.observe("slow", tokens=100, seconds=10.0, crowd=1.0)
    >>> speeds.observe("fast", tokens=100, seconds=4.0, crowd=2.0)
    >>> speeds.of("slow"), speeds.of("fast"), speeds.of("new")
    (10.0, 50.0, 30.0)
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_GROUPS))
        self._speeds: dict[str, float] = {}
        self._seconds: deque[float] = deque(maxlen=RECENT_GROUPS)
        self.typical_s = float("inf")
        """Median time that a group takes to be sampled, of all servers; infinite until one has come."""

    def observe(self, server_id: str, *, tokens: int, seconds: float, crowd: float) -> None:
        """Take a group whose longest trajectory had `tokens` sampled in `seconds`, on a server that had `crowd` times
        as many as it decodes at once: in the rest of the time they waited for their places."""
        if tokens > 0 and seconds > 0:
            recent = self._recent[server_id]
            recent.append(tokens * max(1.0, crowd) / seconds)
            self._speeds[server_id] = median(recent)
            self._seconds.append(seconds)
            self.typical_s = median(self._seconds)

    def of(self, server_id: str) -> float:
        """Median of its last groups; of a server that has sent none yet, the median server's."""
        return self._speeds.get(server_id) or self.typical

    @property
    def typical(self) -> float:
        return median(self._speeds.values()) if self._speeds else 1.0

    def forget(self, server_id: str) -> None:
        """It has left: what comes back under its name may be another machine."""
        self._recent.pop(server_id, None)
        self._speeds.pop(server_id, None)


def crowd_of(held: int, group_size: int, sequences: int) -> float:
    """Trajectories that a server has, in numbers of those that it decodes at once (0: unsaid, it has room for all)."""
    return held * group_size / sequences if sequences else 0.0


class Room(NamedTuple):
    """What a server has and may have."""

    held: int
    """Groups that it has."""
    most: int
    """Groups that it is willing to have."""
    sequences: int
    """Trajectories that it decodes at once; 0: unsaid, as many as it is given."""
    speed: float
    """Tokens a second of one trajectory."""

    def pace(self, more: int, group_size: int) -> float:
        """Relative time that each group takes there, with `more` groups than it has."""
        return max(1.0, crowd_of(self.held + more, group_size, self.sequences)) / self.speed


def share_tickets(
    waiting: Sequence[PreparedTicket], rooms: Mapping[str, Room], may_try: Callable[[int, str], bool]
) -> dict[str, list[PreparedTicket]]:
    """Each ticket's server, in the order of the tickets: the one with the shortest expected time, of equal ones the
    least loaded. None gets more than it is willing to hold.

    `may_try(ticket_id, server_id)` may exclude a pair. A ticket that no server can take is in no share.
    """
    shares: dict[str, list[PreparedTicket]] = {}
    size = max((item.ticket.group_size for item in waiting), default=1)

    def place(order: int, server_id: str) -> tuple[float, int, int, str]:
        given = len(shares.get(server_id, ()))
        return rooms[server_id].pace(given + 1, size), rooms[server_id].held + given, order, server_id

    free = [place(order, name) for order, (name, room) in enumerate(rooms.items()) if room.held < room.most]
    heapq.heapify(free)
    for item in waiting:
        passed: list[tuple[float, int, int, str]] = []
        while free:
            first = heapq.heappop(free)
            _, load, order, server_id = first
            if not may_try(item.ticket.ticket_id, server_id):
                passed.append(first)
                continue
            shares.setdefault(server_id, []).append(item)
            if load + 1 < rooms[server_id].most:
                heapq.heappush(free, place(order, server_id))
            break
        for other in passed:
            heapq.heappush(free, other)
    return shares
