"""The ticket sender: tickets are written a slice at a time, issued together, and shared among the servers.

Tickets go out in the order of issue, each to the server that has the fewest groups and may try it; those of an
evaluation only to servers that keep its version.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.journal.writer import TicketSlot
from learner.groups.ticket import PreparedTicket, first_that_fit
from learner.network.servers import Servers, ServerState
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import TicketLedger
from protocol.codec import Limits
from protocol.faults import crash_point
from protocol.messages import Tickets
from protocol.weights import Publication

logger = logging.getLogger(__name__)

LATE_EVERY_S = 0.1
"""Seconds between two looks for tickets that a server is late with: each goes through all of a thousand servers'."""
SLICE_S = 0.2
"""Longest time that writing tickets takes at a stretch."""


@dataclass
class TicketSender:
    """Used by the network thread alone."""

    servers: Servers
    ledger: TicketLedger
    write_ticket: Callable[[TicketSlot], PreparedTicket]
    limits: Limits
    _admitted: int | None = None
    """Version for which the ledger is asked for training tickets."""
    _preparing: deque[tuple[Iterator[PreparedTicket], list[PreparedTicket]]] = field(default_factory=deque)
    """Tickets still to be written, and those written, of each order."""
    _looked_at: float = float("-inf")
    """Time of the last look for late tickets, in monotonic seconds."""

    @property
    def is_busy(self) -> bool:
        return bool(self._preparing)

    def admit(self, version: int) -> None:
        """From now on, send training tickets as far as the ledger admits them before `version`."""
        self._admitted = version

    def prepare(self, tickets: Iterable[PreparedTicket]) -> None:
        """Write these tickets, and issue them all at once when the last is written."""
        self._preparing.append((iter(tickets), []))

    def look_again(self) -> None:
        """Look in the next iteration for late tickets, and not only when it is time: another server can take them."""
        self._looked_at = float("-inf")

    def work(self) -> None:
        """Run one iteration: write some of the admissible or ordered tickets, and send those that wait."""
        if self._admitted is not None and not self._preparing:  # a preparation decides what is admissible next
            slots = self.ledger.admissible(self._admitted)
            if slots:
                self.prepare(self.write_ticket(slot) for slot in slots)
        self._write_some()
        self._send_waiting()

    def _write_some(self) -> None:
        """Write a slice of the oldest order: reading and encoding many images must not delay the heartbeat."""
        deadline = time.monotonic() + SLICE_S
        while self._preparing and time.monotonic() < deadline:
            unwritten, written = self._preparing[0]
            item = next(unwritten, None)
            if item is None:
                self.ledger.issue(written)
                self._preparing.popleft()
            else:
                written.append(item)

    def _send_waiting(self) -> None:
        """Send each server its share of the waiting tickets in one message, admitted together.

        So are tickets that another server has had for too long. A server that has stalled gets none, unless all have.
        Tickets from before a restart wait until the learner has made its steps again and published: a server could only
        wait for those weights, and would give up.
        """
        servers, out = self.servers.aligned, self.ledger.out
        if not out.has_waiting and time.monotonic() - self._looked_at < LATE_EVERY_S:
            return
        self._looked_at = time.monotonic()
        stalled = out.stalled()
        able = {server_id: server for server_id, server in servers.items() if server_id not in stalled}
        late = out.overdue() if able and len(servers) > 1 else []
        waiting = [item for item in (*late, *out.waiting()) if self._admitted is not None or not item.is_training]
        if not waiting:
            return
        takers = able or servers
        shares: dict[str, list[PreparedTicket]] = {}
        for is_training in (True, False):
            of_kind = [item for item in waiting if item.is_training is is_training]
            for server_id, share in self._shares(of_kind, takers, is_training=is_training).items():
                shares.setdefault(server_id, []).extend(share)
        for server_id, share in shares.items():
            chosen = first_that_fit(share, self.limits)
            self._send(server_id, chosen, self.ledger.batch_mates(chosen) if len(servers) == 1 else [])

    def _shares(
        self, waiting: Sequence[PreparedTicket], takers: Mapping[str, ServerState], *, is_training: bool
    ) -> dict[str, list[PreparedTicket]]:
        out, items, servers = self.ledger.out, {item.ticket.ticket_id: item for item in waiting}, self.servers.aligned

        # By version, not for each pair: a thousand servers have thousands of tickets.
        able = {
            version: {other for other, server in servers.items() if _has_version_for(item, server)}
            for version, item in {_version_of(item): item for item in waiting}.items()
        }

        def may_try(ticket_id: int, server_id: str) -> bool:
            others = able[_version_of(items[ticket_id])]
            return server_id in others and out.may_try(ticket_id, server_id, others)

        held = out.held(is_training=is_training)
        rooms = {name: Room(held.get(name, 0), server.hello.max_groups) for name, server in takers.items()}
        return share_tickets(waiting, rooms, may_try)

    def _send(self, server_id: str, chosen: Sequence[PreparedTicket], mates: Sequence[PreparedTicket]) -> None:
        sent = sorted((*chosen, *mates), key=lambda item: item.ticket.ticket_id) if mates else chosen
        if mates and len(first_that_fit(sent, self.limits)) < len(sent):  # then they were not in one message before
            sent = chosen
        blobs = {digest: memoryview(data) for item in sent for digest, data in item.blobs.items()}
        if self.servers.send(server_id, Tickets(tickets=tuple(item.ticket for item in sent), blobs=blobs)):
            before = self.ledger.out.assign([item.ticket.ticket_id for item in chosen], server_id)
            for holders in sorted(set(before.values())):
                late = [ticket_id for ticket_id, others in before.items() if others == holders]
                logger.warning("%s gets tickets %s, too: %s is late with them", server_id, late, holders)
            crash_point("tickets.sent")


class Room(NamedTuple):
    """Number of groups that a server has, and that it is willing to have."""

    held: int
    most: int


def share_tickets(
    waiting: Sequence[PreparedTicket], rooms: Mapping[str, Room], may_try: Callable[[int, str], bool]
) -> dict[str, list[PreparedTicket]]:
    """Tickets of each server, in the order of `waiting`: each ticket goes to the least loaded server with room.

    `may_try(ticket_id, server_id)` may exclude a pair. A ticket that no server can take is in no share.
    """
    shares: dict[str, list[PreparedTicket]] = {}
    free = [(room.held, order, name) for order, (name, room) in enumerate(rooms.items()) if room.held < room.most]
    heapq.heapify(free)
    for item in waiting:
        passed: list[tuple[int, int, str]] = []
        while free:
            held, order, name = heapq.heappop(free)
            if may_try(item.ticket.ticket_id, name):
                shares.setdefault(name, []).append(item)
                if held + 1 < rooms[name].most:
                    passed.append((held + 1, order, name))
                break
            passed.append((held, order, name))
        for entry in passed:
            heapq.heappush(free, entry)
    return shares


def _has_version_for(item: PreparedTicket, server: ServerState) -> bool:
    """True if the server was told of weights for the ticket, and for what is sampled of it; to evaluate, of just its
    version."""
    return server.told >= _version_of(item) if item.is_training else server.told == _version_of(item)


def _version_of(item: PreparedTicket) -> int:
    return item.ticket.begins_at if item.is_training else item.slot.version


@dataclass
class EvaluationSender:
    """Sends the tickets of an evaluation as there is room. Used by the network thread alone.

    Servers that have the version when the evaluation begins are not told of newer ones before its last row is here;
    they sample training tickets of that version or before beside it, and the learner goes on training as far as the
    staleness bound lets it. A server that joins has the newest version, and trains. Where none is left that keeps the
    evaluated one, or all that do have stalled, the others load it again: they finish what they sample first
    (rollout_server/weights/policy_versions.py).
    """

    servers: Servers
    ledger: TicketLedger
    sender: TicketSender
    publication: Publication
    _running: Evaluation | None = None

    def begin(self, evaluation: Evaluation) -> None:
        """Evaluate the newest version, which the publication holds. All rows of the evaluation before are here."""
        self._end()
        self._running = evaluation
        self.servers.keep_version()

    def work(self) -> None:
        """Run one iteration: as many tickets as there is room for, and the end when the last row is here."""
        if self._running is None:
            return
        for item, reason in self.ledger.out.take_given_up():
            logger.warning("the evaluation of step %d goes on without a score: %s", self._running.step, reason)
            self._running.give_up(item)
        if self._running.is_complete:
            self._end()
            return
        keepers = self.servers.keepers
        if keepers.keys() <= self.ledger.out.stalled():
            self.servers.go_back()
            self.sender.look_again()
        most = sum(server.hello.max_groups for server in keepers.values())
        room = most - self.ledger.out.num_evaluation
        # Half of it at once: an engine that is given single rows interrupts what it decodes for each of them.
        if room > 0 and 2 * room >= most and self._running.has_more and not self.sender.is_busy:
            self.sender.prepare(self._running.tickets(room))

    def _end(self) -> None:
        if self._running is not None:
            self.servers.release_version()
            self.publication.release(self._running.version)
            self._running = None
