"""Moments at which tickets leave the learner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.journal.writer import TicketSlot
from learner.network.servers import Servers
from learner.network.ticket_sender import TicketSender
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.codec import Limits
from protocol.messages import TicketKind, Tickets
from tests.rigs.journal_groups import throwaway_journal
from tests.unit.learner.test_tickets import make_ledger, prepared


class ServersOfAll:
    """Servers that take everything."""

    def __init__(self, *server_ids: str) -> None:
        hello = SimpleNamespace(max_groups=100)
        self.aligned = {name: SimpleNamespace(hello=hello, told=0) for name in server_ids}
        self.sent: list[int] = []
        self.to: list[str] = []

    def send(self, server_id: str, message: Any) -> bool:
        assert isinstance(message, Tickets)
        self.sent += [ticket.ticket_id for ticket in message.tickets]
        self.to += [server_id] * len(message.tickets)
        return True


@pytest.mark.parametrize("others", [(), ("b",), ("b", "c")])
def test_late_tickets_go_to_servers_that_answer_and_new_ones_too(
    others: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """With one server there is nobody else: it gets everything, and learner.wait_timeout_s stays the limit."""
    ledger = make_ledger(2, 1, 8, deadline=TicketDeadline(unmeasured_s=-1.0))
    ledger.issue([prepared(slot) for slot in ledger.admissible(0)][:2])
    ledger.out.assign([0, 1], "a")
    servers = ServersOfAll("a", *others)
    sender = TicketSender(cast(Servers, servers), ledger, prepared, Limits())
    sender.admit(0)
    sender.work()
    if not others:
        assert (servers.sent, servers.to) == ([2, 3], ["a"] * 2)
    else:
        assert sorted(servers.sent) == [0, 1, 2, 3]
        assert set(servers.to) == set(others), "a has stalled"
        assert "gets tickets [0" in caplog.text
        assert "too: a is late with them" in caplog.text
    ledger.out.deadline = TicketDeadline()
    sender.work()
    assert len(servers.sent) == (4 if others else 2), "once"


def test_tickets_of_before_a_restart_wait_for_the_first_publication() -> None:
    """A server could only wait for weights that are not there, fail the ticket, and end the run."""
    before = TicketLedger(throwaway_journal(), prompts_per_step=2, bound=0, total_groups=4)
    before.issue([prepared(slot) for slot in before.admissible(0)])
    ledger = TicketLedger(before.journal, prompts_per_step=2, bound=0, total_groups=4)
    ledger.recover(prepared, withhold_s=0.0)
    server = ServersOfAll("s")
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
