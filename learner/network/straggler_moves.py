"""Stragglers move: where one server is free and another works on a group for long, the group goes on at the free one.

A group moves as tokens (protocol/README.md, rule 13): nothing is sampled twice, so a move costs messages and a prefill.
It is worth that where the next step waits for the group, and the free server is clearly faster than the one that has
it, by measured speeds and by what both have to do. The longest held come first; a group that has moved once stays.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field

from learner.network.servers import Servers
from learner.network.ticket_sender import rooms_of
from learner.tickets.hand_out import Room
from learner.tickets.ledger import TicketLedger
from protocol.messages import TicketRecall

logger = logging.getLogger(__name__)

FASTER = 1.5
"""Times as fast as its server another one must be for a group to move there."""
LOOKS_PER_GROUP = 4
"""Looks in the time that a group takes."""


@dataclass
class StragglerMoves:
    """Used by the network thread alone."""

    servers: Servers
    ledger: TicketLedger
    divides: bool = False
    """Whether a group may go on at several servers."""
    _looked_at: float = 0.0
    _moved: dict[int, str] = field(default_factory=dict)
    """Tickets that were recalled, of those that are out, and from whom."""

    def work(self) -> None:
        """Run one iteration: recall what would be ready sooner elsewhere, if nothing else waits for a server."""
        now, typical_s = time.monotonic(), self.servers.speeds.typical_s
        if len(self.servers.connected) < 2 or now - self._looked_at < typical_s / LOOKS_PER_GROUP:
            return
        self._looked_at = now
        out = self.ledger.out
        # Not those from before a restart, which wait for their servers to come back.
        tickets = {ticket_id: entry for ticket_id, entry in out.training().items() if entry.holders}
        self._moved = {i: holder for i, holder in self._moved.items() if i in tickets}
        on_the_way = any(holder in tickets[i].holders for i, holder in self._moved.items())
        if on_the_way or out.waiting() or self.ledger.ready():
            return
        blocking = {ticket_id for ticket_id, _, _ in self.ledger.blockers()}
        stalled = out.stalled()
        able = {server_id: s for server_id, s in self.servers.aligned.items() if server_id not in stalled}
        rooms = rooms_of(self.servers, self.ledger, able, is_training=True)
        recalled: dict[str, list[int]] = defaultdict(list)
        for ticket_id, entry in sorted(tickets.items(), key=lambda item: min(item[1].holders.values())):
            if ticket_id not in blocking:
                continue
            ticket, (holder, *others) = entry.prepared.ticket, entry.holders
            since = entry.holders[holder]
            is_movable = entry.prepared.is_movable and ticket_id not in self._moved
            if now - since <= typical_s:
                break
            if others or not is_movable or holder not in rooms:
                continue
            targets = self._free(rooms, holder, ticket.group_size)
            if not targets:
                continue
            for target, places in targets.items():
                rooms[target] = rooms[target]._replace(held=rooms[target].held + places / ticket.group_size)
            rooms[holder] = rooms[holder]._replace(held=rooms[holder].held - 1)
            recalled[holder].append(ticket_id)
        for holder, ticket_ids in recalled.items():
            logger.info("%s is asked for tickets %s back: others are free and faster", holder, ticket_ids)
            if self.servers.send(holder, TicketRecall(ticket_ids=tuple(ticket_ids))):
                self._moved |= dict.fromkeys(ticket_ids, holder)

    def _free(self, rooms: dict[str, Room], holder: str, group_size: int) -> dict[str, int]:
        """Places for a whole group, by server, if each is clearly faster than the holder; empty: there are none.

        The fastest server with places for all of it; where there is none, and groups are divided, the fastest ones.
        """
        limit = rooms[holder].pace(0, group_size) / FASTER
        free = {
            name: room.free(group_size)
            for name, room in sorted(rooms.items(), key=lambda item: -item[1].speed)
            if name != holder and room.held < room.most and room.sequences and 1 / room.speed <= limit
        }
        for name, places in free.items():
            if places >= group_size:
                return {name: group_size}
        targets: dict[str, int] = {}
        for name, places in free.items() if self.divides else ():
            targets[name] = min(places, group_size - sum(targets.values()))
            if sum(targets.values()) == group_size:
                return targets
        return {}
