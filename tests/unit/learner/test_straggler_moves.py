"""Which groups are asked back for a free and faster server."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.journal.writer import TicketSlot
from learner.network.servers import Servers
from learner.network.straggler_moves import StragglerMoves
from learner.tickets.hand_out import ServerSpeeds
from protocol.messages import TicketRecall
from tests.unit.learner.test_tickets import arrive, ids, issue, make_ledger, prepared


class TwoServers:
    """One slow and one fast, with places for a few groups of two."""

    def __init__(self, slow: float = 1.0, fast: float = 4.0, places: int = 4) -> None:
        hello = SimpleNamespace(max_groups=100, max_sequences=places)
        self.connected = self.aligned = {name: SimpleNamespace(hello=hello, told=0) for name in ("slow", "fast")}
        self.speeds = ServerSpeeds()
        for name, speed in (("slow", slow), ("fast", fast)):
            self.speeds.observe(name, tokens=10, seconds=10 / speed, crowd=1.0)
        self.speeds.typical_s = 1.0
        self.recalled: list[tuple[str, tuple[int, ...]]] = []

    def send(self, server_id: str, message: Any) -> bool:
        assert isinstance(message, TicketRecall)
        self.recalled.append((server_id, message.ticket_ids))
        return True


@pytest.mark.parametrize(
    ("servers", "bound", "held_s", "fast_has", "expected"),
    [
        (TwoServers(), 1, 9.0, 0, [("slow", (0, 1))]),
        (TwoServers(), 1, 9.0, 1, [("slow", (0,))]),
        (TwoServers(), 1, 9.0, 2, []),
        (TwoServers(), 1, 0.1, 0, []),
        (TwoServers(fast=1.2), 1, 9.0, 0, []),
        (TwoServers(), 0, 9.0, 0, []),
    ],
    ids=["two places", "one place", "no place", "no straggler yet", "hardly faster", "on-policy"],
)
def test_a_straggler_moves_to_a_free_and_faster_server(
    servers: TwoServers, bound: int, held_s: float, fast_has: int, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    ledger = make_ledger(4, bound, 4)
    tickets = issue(ledger, 0)
    ledger.out.assign(ids(tickets[:2]), "slow")
    ledger.out.assign(ids(tickets[2 : 2 + fast_has]), "fast")
    for item in tickets[2 + fast_has :]:
        ledger.out.assign(ids([item]), "slow")
        arrive(ledger, item, server_id="slow")
    withheld = prepared(TicketSlot(100, 100, 0, bound))
    ledger.out.add(withheld, withheld_until=time.monotonic() + 60.0)
    now = time.monotonic()
    for entry in ledger.out.training().values():
        entry.holders.update(dict.fromkeys(entry.holders, now - held_s))
    moves = StragglerMoves(cast(Servers, servers), ledger)
    moves.work()
    assert servers.recalled == expected
    moves._looked_at = 0.0
    moves.work()
    assert servers.recalled == expected, "once"
