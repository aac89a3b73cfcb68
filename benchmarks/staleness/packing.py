"""Running trajectories packed onto few servers before a publication, so that the others are free for new weights.

A policy of the simulation alone, and better informed than a learner could be: it sees how many trajectories of each
group are unfinished, and which servers have room. A group moves as the product moves it: recalled, returned as tokens
and sent again. Results are in docs/lab-log/staleness.md;
docs/decisions/024-long-tails.md says why it is not built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from learner.network.servers import ServerState
from learner.network.ticket_sender import TicketSender
from learner.tickets.ticket import PreparedTicket
from protocol.messages import TicketRecall

if TYPE_CHECKING:
    from benchmarks.staleness.simulation import SimulatedServer

LEAD_S = 0.03
"""Before a publication: what moves is at its server by then."""


@dataclass
class PackingSender(TicketSender):
    """Sends what was recalled to where it shall go on, and new tickets to servers that do not drain."""

    simulated: Mapping[str, SimulatedServer] = field(default_factory=dict)
    _packed: dict[int, str] = field(default_factory=dict)

    def pack(self, places: int, send: Callable[[str, TicketRecall], object]) -> None:
        """Empty as many servers as the places of the others allow, those with the least to do first."""
        out, version = self.ledger.out, self.servers.version
        if out.has_waiting or self.is_busy:
            return
        training = out.training()
        work = {
            name: server.engine.unfinished
            for name, server in self.simulated.items()
            if server.engine.version == version and not server.is_waiting
        }
        free = {name: places - sum(work[name].values()) for name in work}
        targets: set[str] = set()
        emptied: set[str] = set()
        for name in sorted(work, key=lambda name: -free[name]):
            if not work[name] or name in targets:
                continue
            left, moves = dict(free), {}
            for ticket_id, count in sorted(work[name].items(), key=lambda item: -item[1]):
                able = [n for n in left if n not in {name, *emptied} and work[n] and left[n] >= count]
                entry = training.get(ticket_id)
                if not able or entry is None or not entry.prepared.is_movable:
                    break
                moves[ticket_id] = min(able, key=lambda n: left[n])
                left[moves[ticket_id]] -= count
            if len(moves) == len(work[name]):
                free, self._packed = left, self._packed | moves
                targets |= {*moves.values()}
                emptied.add(name)
                send(name, TicketRecall(ticket_ids=tuple(moves)))

    def _shares(
        self, waiting: Sequence[PreparedTicket], takers: Mapping[str, ServerState], *, is_training: bool, divides: bool
    ) -> dict[str, list[PreparedTicket]]:
        shares: dict[str, list[PreparedTicket]] = {}
        for item in waiting:
            target = self._packed.pop(item.ticket.ticket_id, None)
            if target is not None:
                shares.setdefault(target, []).append(item)
        packed = {item.ticket.ticket_id for share in shares.values() for item in share}
        rest = [item for item in waiting if item.ticket.ticket_id not in packed]
        draining = {name for name, server in self.simulated.items() if server.will_drain(self.servers.version)}
        takers = {name: state for name, state in takers.items() if name not in draining} or takers
        for name, share in super()._shares(rest, takers, is_training=is_training, divides=divides).items():
            shares.setdefault(name, []).extend(share)
        return shares
