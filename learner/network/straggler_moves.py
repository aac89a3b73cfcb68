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
        tickets = out.training()
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
            is_movable = entry.prepared.slot.bound > 0 and ticket.conversation is None and ticket_id not in self._moved
            if now - since <= typical_s:
                break
            if others or not is_movable or holder not in rooms:
                continue
            target = self._free(rooms, holder, ticket.group_size)
            if target is None:
                continue
            rooms[target] = rooms[target]._replace(held=rooms[target].held + 1)
            rooms[holder] = rooms[holder]._replace(held=rooms[holder].held - 1)
            recalled[holder].append(ticket_id)
        for holder, ticket_ids in recalled.items():
            logger.info("%s is asked for tickets %s back: others are free and faster", holder, ticket_ids)
            if self.servers.send(holder, TicketRecall(ticket_ids=tuple(ticket_ids))):
                self._moved |= dict.fromkeys(ticket_ids, holder)

    def _free(self, rooms: dict[str, Room], holder: str, group_size: int) -> str | None:
        """The fastest server with places for a whole group, if it is clearly faster than the holder."""
        free = {
            name: room.pace(1, group_size)
            for name, room in rooms.items()
            if room.held < room.most and (room.held + 1) * group_size <= room.sequences
        }
        if not free:
            return None
        target = min(free, key=lambda name: free[name])
        return target if free[target] * FASTER <= rooms[holder].pace(0, group_size) else None
