"""Who gets work: only a server whose parity groups were accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncrl.errors import BadStateError
from asyncrl.journal.writer import Journal, TicketSlot
from learner.network.parity_handshake import ParityHandshake
from learner.network.servers import ServerState
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket import PreparedTicket
from learner.tickets.writer import PARITY_IDS
from protocol.codec import Limits
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Ack, Group, Refusal, TicketFailed, Tickets, WeightsLoaded
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import write_ticket


class FakeServers:
    """Servers that take everything."""

    def __init__(self, *names: str):
        self.servers = {name: ServerState(content.hello(name), name.encode()) for name in names}
        self.manifest: Any = None
        self.sent: list[tuple[str, Any]] = []
        self.errors: list[str] = []

    def send(self, server_id: str, message: Any) -> bool:
        self.sent.append((server_id, message))
        return True

    def count_error(self, kind: str) -> None:
        self.errors.append(kind)

    def publish(self, version: int) -> None:
        self.manifest = type("Manifest", (), {"version": version})

    def tickets_of(self, server_id: str) -> list[Any]:
        return [t for name, m in self.sent if name == server_id and isinstance(m, Tickets) for t in m.tickets]

    def refusals(self) -> list[Refusal]:
        return [message for _, message in self.sent if isinstance(message, Refusal)]


@pytest.fixture
def items() -> list[PreparedTicket]:
    return [write_ticket(TicketSlot(number, number, version=0, bound=0)) for number in range(2)]


def empty_ledger() -> TicketLedger:
    return TicketLedger(Journal(None), prompts_per_step=1, bound=0, total_groups=1)


def alignment_of(
    connections: FakeServers,
    items: Sequence[PreparedTicket],
    deadline_s: float = 60.0,
    ledger: TicketLedger | None = None,
) -> ParityHandshake:

    def check(group: Group, ticket: Any, facts: Any, **_: Any) -> None:
        if not content.is_right(group.model_copy(update={"ticket_id": ticket.seed})):
            raise ProtocolError(ErrorCode.REFUSED_GROUP, f"row {ticket.prompt.row_id}: wrong")

    ledger = ledger or empty_ledger()
    return ParityHandshake(cast(Any, connections), ledger, items, check, limits=Limits(), deadline_s=deadline_s)


def send_back(alignment: ParityHandshake, connections: FakeServers, server_id: str, version: int) -> None:
    for ticket in connections.tickets_of(server_id)[-2:]:
        right = content.group(ticket.seed, version, server_id)
        assert alignment.awaits(server_id, ticket.ticket_id)
        alignment.accept(server_id, right.model_copy(update={"ticket_id": ticket.ticket_id}), version)


def test_a_server_gets_work_only_when_its_parity_groups_are_accepted(items: list[PreparedTicket]) -> None:
    connections = FakeServers("a")
    alignment = alignment_of(connections, items)
    alignment.work()
    assert not connections.sent, "nothing is published yet"
    connections.publish(3)
    alignment.work()
    alignment.work()
    sent = connections.tickets_of("a")
    assert [ticket.min_version for ticket in sent] == [3, 3]
    assert min(ticket.ticket_id for ticket in sent) >= PARITY_IDS
    assert alignment.holds_step is None, "a server that has no weights yet takes its time"
    connections.servers["a"].loaded = WeightsLoaded(version=3, channel="shm", transfer_s=0, load_s=0)
    assert alignment.holds_step == "a"
    assert not alignment.awaits("b", sent[0].ticket_id), "another server's"
    assert not alignment.take_complete()
    send_back(alignment, connections, "a", 3)
    assert sum(isinstance(message, Ack) for _, message in connections.sent) == 2
    (check,) = alignment.take_complete()
    assert alignment.holds_step == "a"
    assert not connections.servers["a"].aligned
    alignment.accept_server(check)
    assert connections.servers["a"].aligned
    assert alignment.holds_step is None


def test_groups_of_an_older_version_are_asked_for_again(items: list[PreparedTicket]) -> None:
    connections = FakeServers("a")
    alignment = alignment_of(connections, items)
    connections.publish(0)
    alignment.work()
    send_back(alignment, connections, "a", 0)
    (check,) = alignment.take_complete()
    connections.publish(1)
    alignment.repeat(check)
    tickets = connections.tickets_of("a")
    assert [ticket.min_version for ticket in tickets] == [0, 0, 1, 1]
    assert len({ticket.ticket_id for ticket in tickets}) == 4
    assert [t.seed for t in tickets[2:]] == [t.seed for t in tickets[:2]]


def test_a_reconnection_is_not_checked_again_and_a_new_process_is(items: list[PreparedTicket]) -> None:
    connections = FakeServers("a")
    alignment = alignment_of(connections, items)
    connections.publish(0)
    alignment.work()
    send_back(alignment, connections, "a", 0)
    alignment.accept_server(alignment.take_complete()[0])
    for session, aligned in (("session-of-a", True), ("another", False)):
        hello = content.hello("a").model_copy(update={"session": session})
        connections.servers["a"] = ServerState(hello, b"new connection")
        alignment.work()
        assert connections.servers["a"].aligned is aligned


def test_a_server_that_still_holds_tickets_is_checked_when_they_are_done(items: list[PreparedTicket]) -> None:
    """Beside them, the parity rows would move the last bits of a training group."""
    connections, ledger = FakeServers("a"), empty_ledger()
    alignment = alignment_of(connections, items, ledger=ledger)
    connections.publish(0)
    ledger.issue([write_ticket(slot) for slot in ledger.admissible(0)])
    ledger.out.assign([0], "a")
    alignment.work()
    assert not connections.sent
    ledger.out.lose_server("a")
    alignment.work()
    assert len(connections.tickets_of("a")) == 2


def _mismatch(alignment: ParityHandshake, connections: FakeServers) -> None:
    send_back(alignment, connections, "a", 0)
    alignment.refuse(alignment.take_complete()[0], "they differ by 0.5 nats", "mend it")


def _wrong_group(alignment: ParityHandshake, connections: FakeServers) -> None:
    ticket = connections.tickets_of("a")[0]
    wrong = content.group(17, 0, "a").model_copy(update={"ticket_id": ticket.ticket_id})
    alignment.accept("a", wrong, 0)


def _three_failures(alignment: ParityHandshake, connections: FakeServers) -> None:
    for _ in range(3):
        ticket = connections.tickets_of("a")[-1]
        alignment.fail("a", TicketFailed(ticket_id=ticket.ticket_id, error_kind="Broken", error_message="no memory"))


def _silence(alignment: ParityHandshake, connections: FakeServers) -> None:
    alignment._looked_at -= 10.0
    alignment.work()


REFUSALS: dict[str, tuple[Callable[[ParityHandshake, FakeServers], None], str]] = {
    "other log-probs": (_mismatch, "they differ by 0.5 nats"),
    "a wrong group": (_wrong_group, "row fuzz:0: wrong"),
    "failures": (_three_failures, "row fuzz:1 from a failed 3 times: Broken: no memory"),
    "silence": (_silence, "it has not answered its parity tickets for 1 s"),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_server_that_fails_is_refused_and_the_only_one_ends_the_run(
    items: list[PreparedTicket], name: str, alone: bool
) -> None:
    connections = FakeServers("a") if alone else FakeServers("a", "b")
    alignment = alignment_of(connections, items, deadline_s=1.0)
    connections.publish(0)
    alignment.work()
    if not alone:
        send_back(alignment, connections, "b", 0)
    fails, says = REFUSALS[name]
    if alone:
        with pytest.raises(BadStateError, match=f"server 'a' is refused: {says}.*No other rollout server is connected"):
            fails(alignment, connections)
    else:
        fails(alignment, connections)
    (refusal,) = connections.refusals()
    assert refusal.code is ErrorCode.PARITY
    assert says in refusal.reason
    assert connections.servers["a"].refused
    assert connections.errors == ["parity"]
    alignment.work()
    assert not connections.servers["a"].aligned, "it is not asked again"


def test_without_rows_every_server_is_aligned() -> None:
    connections = FakeServers("a")
    alignment_of(connections, []).work()
    assert connections.servers["a"].aligned


@pytest.mark.parametrize("verdict", ["accept_server", "refuse", "repeat"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_verdict_on_a_server_that_has_gone_meanwhile_is_about_nobody(
    items: list[PreparedTicket], verdict: str, comes_back: bool
) -> None:
    """It died while the learner compared its log-probs; what comes back in a new session has a check of its own."""
    connections = FakeServers("a", "b")
    alignment = alignment_of(connections, items)
    connections.publish(0)
    alignment.work()
    send_back(alignment, connections, "a", 0)
    (check,) = alignment.take_complete()
    del connections.servers["a"]
    alignment.work()
    if comes_back:
        hello = content.hello("a").model_copy(update={"session": "new"})
        connections.servers["a"] = ServerState(hello, b"x")
        alignment.work()
    sent = len(connections.tickets_of("a"))
    getattr(alignment, verdict)(check, *(("reason", "fix") if verdict == "refuse" else ()))
    alignment.work()
    assert len(connections.tickets_of("a")) == sent
    assert not check.server.aligned
    assert not any(server.aligned or server.refused for name, server in connections.servers.items() if name == "a")
