"""When tickets leave the learner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from asyncrl.journal.writer import TicketSlot
from learner.network.servers import Servers
from learner.network.ticket_sender import TicketSender
from learner.tickets.ledger import TicketLedger
from protocol.codec import Limits
from protocol.messages import TicketKind, Tickets
from tests.rigs.journal_groups import throwaway_journal
from tests.unit.learner.test_tickets import prepared


class ServerOfAll:
    """One server, which takes everything."""

    def __init__(self) -> None:
        self.aligned = {"s": SimpleNamespace(hello=SimpleNamespace(max_groups=100), told=0)}
        self.sent: list[int] = []

    def send(self, server_id: str, message: Any) -> bool:
        assert isinstance(message, Tickets)
        self.sent += [ticket.ticket_id for ticket in message.tickets]
        return True


def test_tickets_of_before_a_restart_wait_for_the_first_publication() -> None:
    """A server could only wait for weights that are not there, fail the ticket, and end the run."""
    before = TicketLedger(throwaway_journal(), prompts_per_step=2, bound=0, total_groups=4)
    before.issue([prepared(slot) for slot in before.admissible(0)])
    ledger = TicketLedger(before.journal, prompts_per_step=2, bound=0, total_groups=4)
    ledger.recover(prepared, withhold_s=0.0)
    server = ServerOfAll()
    sender = TicketSender(cast(Servers, server), ledger, prepared, Limits())
    sender.work()
    assert server.sent == [], "the learner makes its steps again and has published nothing"
    evaluation = prepared(TicketSlot(2**40, 0, 0, 0), TicketKind.EVAL)
    sender.prepare([evaluation])
    sender.work()
    assert server.sent == [2**40]
    sender.admit(0)
    sender.work()
    assert server.sent == [2**40, 0, 1]
