"""Assignment of tickets: the server that is expected to send its group first gets the next one.

A server decodes so many sequences at once, each at so many tokens a second. As long as it has a place for all that it
holds, another group takes there what its tokens take; from then on groups share the places, and each takes longer in
proportion. Speeds are measured from the groups that come back, queueing included, so that a server which is slower than
it promised gets less, and a fleet of different machines needs no configuration.

Of tickets that were issued together those go first whose rows had the longest completions before: what takes longest
should not begin last. A group that no server has places for may be divided among several that have.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import NamedTuple

import numpy as np

from learner.tickets.ticket import PreparedTicket
from protocol.messages import Ticket

RECENT_GROUPS = 32
"""Over which a server's speed is taken: one that slows down is noticed within as many groups."""
ROUNDING = 1e-6
"""Absolute tolerance when adding fractional group loads."""


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

    def take(
        self, server_id: str, ticket: Ticket, lengths: np.ndarray, seconds: float, *, held: float, sequences: int
    ) -> None:
        """Take the time in which a ticket's trajectories have grown to these [group_size] `lengths`, on a server that
        `held` so many groups and decodes so many `sequences` at once."""
        sampled = lengths - (ticket.partial.lengths if ticket.partial else 0)
        crowd = crowd_of(held, ticket.group_size, sequences)
        self.observe(server_id, tokens=int(sampled.max()), seconds=seconds, crowd=crowd)

    def of(self, server_id: str) -> float:
        """Median of its last groups; of a server that has sent none yet, the median server's."""
        return self._speeds.get(server_id) or self.typical

    @property
    def typical(self) -> float:
        return median(self._speeds.values()) if self._speeds else 1.0

    def forget(self, server_id: str) -> None:
        """Forget a server that has left: its name may come back on another machine."""
        self._recent.pop(server_id, None)
        self._speeds.pop(server_id, None)


class ExpectedLengths:
    """Tokens of a completion to a row, from its groups of earlier epochs. A new process begins without any.

    >>> lengths = ExpectedLengths()
    >>> lengths.observe("rows:1", 100.0)
    >>> lengths.observe("rows:1", 200.0)
    >>> lengths.of("rows:1"), lengths.of("rows:2")
    (150.0, 150.0)
    """

    NEWEST = 0.5
    """Weight of the newest group of a row."""

    def __init__(self) -> None:
        self._of_rows: dict[str, float] = {}
        self._typical, self._groups = 0.0, 0

    def observe(self, row_id: str, tokens: float) -> None:
        """Take the mean length of a group's completions."""
        known = self._of_rows.get(row_id)
        self._of_rows[row_id] = tokens if known is None else known + self.NEWEST * (tokens - known)
        self._groups += 1
        self._typical += (tokens - self._typical) / min(self._groups, RECENT_GROUPS)

    def of(self, row_id: str) -> float:
        """A row's, or what is usual where it is not known yet."""
        return self._of_rows.get(row_id, self._typical)


def crowd_of(held: float, group_size: int, sequences: int) -> float:
    """Trajectories that a server has, in numbers of those that it decodes at once (0: unsaid, it has room for all)."""
    return held * group_size / sequences if sequences else 0.0


class Room(NamedTuple):
    """Capacity of a server: used and allowed."""

    held: float
    """Groups that it has."""
    most: int
    """Groups that it is willing to have."""
    sequences: int
    """Trajectories that it decodes at once; 0: unsaid, as many as it is given."""
    speed: float
    """Tokens a second of one trajectory."""

    def pace(self, more: float, group_size: int) -> float:
        """Relative time that each group takes there, with `more` groups than it has."""
        return max(1.0, crowd_of(self.held + more, group_size, self.sequences)) / self.speed

    def free(self, group_size: int) -> int:
        """Places for trajectories that nothing waits for; unsaid, as many as anybody asks for."""
        return max(0, self.sequences - math.ceil(self.held * group_size - ROUNDING)) if self.sequences else sys.maxsize


def share_tickets(
    waiting: Sequence[PreparedTicket],
    rooms: Mapping[str, Room],
    may_try: Callable[[int, str], bool],
    *,
    divides: bool = False,
) -> dict[str, list[PreparedTicket]]:
    """Each ticket's server, in the order of the tickets: the one with the shortest expected time, of equal ones the
    least loaded. None gets more than it is willing to hold. A ticket that is sampled to its end takes no room.

    `may_try(ticket_id, server_id)` may exclude a pair. A ticket that no server can take is in no share. With `divides`
    a movable group that would have to wait for places is divided among servers that have places, if there are enough
    and the slowest of them is expected to be done sooner.
    """
    hands = _Hands(rooms, max((item.ticket.group_size for item in waiting), default=1), may_try)
    for item in waiting:
        if not item.unfinished:
            hands.give_anyone(item)
        elif not (divides and item.is_movable and hands.divide(item)):
            hands.give(item)
    return hands.shares


class _Hands:
    """Servers with room, the best one first, and what each gets."""

    def __init__(self, rooms: Mapping[str, Room], size: int, may_try: Callable[[int, str], bool]):
        self.shares: dict[str, list[PreparedTicket]] = {}
        self._rooms = dict(rooms)
        self._order = {server_id: order for order, server_id in enumerate(rooms)}
        self._size = size
        self._may_try = may_try
        self._free = [self._place(server_id) for server_id, room in rooms.items() if room.held < room.most]
        heapq.heapify(self._free)

    def _place(self, server_id: str) -> tuple[float, float, int, str]:
        room = self._rooms[server_id]
        return room.pace(1, self._size), room.held, self._order[server_id], server_id

    def _best(self, ticket_id: int) -> Generator[str, None, None]:
        """Servers that may have the ticket, the best one first. Those that were looked at are where they belong again
        when the iterator is closed, with what they have by then."""
        passed: list[str] = []
        try:
            while self._free:
                passed.append(heapq.heappop(self._free)[-1])
                if self._may_try(ticket_id, passed[-1]):
                    yield passed[-1]
        finally:
            for server_id in passed:
                if self._rooms[server_id].held < self._rooms[server_id].most:
                    heapq.heappush(self._free, self._place(server_id))

    def _add(self, server_id: str, item: PreparedTicket) -> None:
        self.shares.setdefault(server_id, []).append(item)
        room = self._rooms[server_id]
        self._rooms[server_id] = room._replace(held=room.held + item.portion)

    def give(self, item: PreparedTicket) -> None:
        """To the best server, if any may have it."""
        with closing(self._best(item.ticket.ticket_id)) as best:
            for server_id in best:
                self._add(server_id, item)
                break

    def give_anyone(self, item: PreparedTicket) -> None:
        """To the server with the least to do: no place is needed."""
        able = [name for name in self._rooms if self._may_try(item.ticket.ticket_id, name)]
        if able:
            self._add(min(able, key=lambda name: self._rooms[name].held), item)

    def divide(self, item: PreparedTicket) -> bool:
        """Divide it, if that is quicker; False: it is not."""
        left, size, slowest = list(item.unfinished), item.ticket.group_size, 0.0
        whole: float | None = None
        parts: dict[str, list[int]] = {}
        with closing(self._best(item.ticket.ticket_id)) as best:
            for server_id in best:
                room = self._rooms[server_id]
                whole = room.pace(item.portion, size) if whole is None else whole
                count = min(len(left), room.free(size))
                if not count or (not parts and count == len(left)):  # nothing is free, or it has places for all of it
                    break
                parts[server_id], left = left[:count], left[count:]
                slowest = max(slowest, 1 / room.speed)
                if not left:
                    break
            if left or whole is None or slowest >= whole:
                return False
            for server_id, indices in parts.items():
                self._add(server_id, item.divided(indices))
        return True
