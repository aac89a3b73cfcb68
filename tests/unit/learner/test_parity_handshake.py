"""Who gets work: only a server whose parity groups were accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncrl.errors import BadStateError
from asyncrl.journal.writer import TicketSlot
from learner.network.parity_handshake import ParityHandshake
from learner.network.servers import ServerState
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket import PreparedTicket
from learner.tickets.ticket_writer import PARITY_IDS
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Ack, Group, Refusal, TicketFailed, Tickets, WeightsLoaded
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import write_ticket
from tests.rigs.journal_groups import throwaway_journal


class FakeServers:
    """Stand-in for `Servers`: every message is delivered and kept."""

    def __init__(self, *names: str):
        self.connected = {name: ServerState(content.hello(name), name.encode()) for name in names}
        self.manifest: Any = None
        self.version = 0
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
    return TicketLedger(throwaway_journal(), prompts_per_step=1, bound=0, total_groups=1)


def handshake_of(
    servers: FakeServers,
    items: Sequence[PreparedTicket],
    deadline_s: float = 60.0,
    ledger: TicketLedger | None = None,
) -> ParityHandshake:

    def check(group: Group, ticket: Any, facts: Any, **_: Any) -> None:
        if not content.is_right(group.model_copy(update={"ticket_id": ticket.seed})):
            raise ProtocolError(ErrorCode.REFUSED_GROUP, f"row {ticket.prompt.row_id}: wrong")

    ledger = ledger or empty_ledger()
    return ParityHandshake(cast(Any, servers), ledger, items, check, deadline_s)


def send_back(handshake: ParityHandshake, servers: FakeServers, server_id: str, version: int) -> None:
    for ticket in servers.tickets_of(server_id)[-2:]:
        right = content.group(ticket.seed, version, server_id)
        assert handshake.awaits(server_id, ticket.ticket_id)
        handshake.accept_group(server_id, right.model_copy(update={"ticket_id": ticket.ticket_id}))


def test_a_server_gets_work_only_when_its_parity_groups_are_accepted(items: list[PreparedTicket]) -> None:
    servers = FakeServers("a")
    handshake = handshake_of(servers, items)
    handshake.work()
    assert not servers.sent, "nothing is published yet"
    servers.publish(3)
    handshake.work()
    handshake.work()
    sent = servers.tickets_of("a")
    assert [ticket.min_version for ticket in sent] == [3, 3]
    assert min(ticket.ticket_id for ticket in sent) >= PARITY_IDS
    assert handshake.holds_step is None, "a server that has no weights yet takes its time"
    servers.connected["a"].loaded = WeightsLoaded(version=3, channel="shm", transfer_s=0, load_s=0)
    assert handshake.holds_step == "a"
    assert not handshake.awaits("b", sent[0].ticket_id), "another server's"
    assert not handshake.take_complete()
    send_back(handshake, servers, "a", 3)
    assert sum(isinstance(message, Ack) for _, message in servers.sent) == 2
    (check,) = handshake.take_complete()
    assert handshake.holds_step == "a"
    assert not servers.connected["a"].aligned
    handshake.accept_server(check)
    assert servers.connected["a"].aligned
    assert handshake.holds_step is None


def test_groups_of_an_older_version_are_asked_for_again(items: list[PreparedTicket]) -> None:
    servers = FakeServers("a")
    handshake = handshake_of(servers, items)
    servers.publish(0)
    handshake.work()
    send_back(handshake, servers, "a", 0)
    (check,) = handshake.take_complete()
    servers.publish(1)
    handshake.repeat(check)
    tickets = servers.tickets_of("a")
    assert [ticket.min_version for ticket in tickets] == [0, 0, 1, 1]
    assert len({ticket.ticket_id for ticket in tickets}) == 4
    assert [t.seed for t in tickets[2:]] == [t.seed for t in tickets[:2]]


def test_a_reconnection_is_not_checked_again_and_a_new_process_is(items: list[PreparedTicket]) -> None:
    servers = FakeServers("a")
    handshake = handshake_of(servers, items)
    servers.publish(0)
    handshake.work()
    send_back(handshake, servers, "a", 0)
    handshake.accept_server(handshake.take_complete()[0])
    for session, aligned in (("session-of-a", True), ("another", False)):
        hello = content.hello("a").model_copy(update={"session": session})
        servers.connected["a"] = ServerState(hello, b"new connection")
        handshake.work()
        assert servers.connected["a"].aligned is aligned


def test_a_server_that_still_holds_tickets_is_checked_when_they_are_done(items: list[PreparedTicket]) -> None:
    """Beside them, the parity rows would move the last bits of a training group."""
    servers, ledger = FakeServers("a"), empty_ledger()
    handshake = handshake_of(servers, items, ledger=ledger)
    servers.publish(0)
    ledger.issue([write_ticket(slot) for slot in ledger.admissible(0)])
    ledger.out.assign([0], "a")
    handshake.work()
    assert not servers.sent
    ledger.out.reconcile("a")
    handshake.work()
    assert len(servers.tickets_of("a")) == 2


def _mismatch(handshake: ParityHandshake, servers: FakeServers) -> None:
    send_back(handshake, servers, "a", 0)
    handshake.refuse(handshake.take_complete()[0], "they differ by 0.5 nats", "mend it")


def _wrong_group(handshake: ParityHandshake, servers: FakeServers) -> None:
    ticket = servers.tickets_of("a")[0]
    wrong = content.group(17, 0, "a").model_copy(update={"ticket_id": ticket.ticket_id})
    handshake.accept_group("a", wrong)


def _three_failures(handshake: ParityHandshake, servers: FakeServers) -> None:
    for _ in range(3):
        ticket = servers.tickets_of("a")[-1]
        handshake.fail_ticket(
            "a", TicketFailed(ticket_id=ticket.ticket_id, error_kind="Broken", error_message="no memory")
        )


def _silence(handshake: ParityHandshake, servers: FakeServers) -> None:
    handshake._last_turn_at -= 10.0
    handshake.work()


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
    servers = FakeServers("a") if alone else FakeServers("a", "b")
    handshake = handshake_of(servers, items, deadline_s=1.0)
    servers.publish(0)
    handshake.work()
    if not alone:
        send_back(handshake, servers, "b", 0)
    fails, says = REFUSALS[name]
    if alone:
        with pytest.raises(BadStateError, match=f"server 'a' is refused: {says}.*No other rollout server is connected"):
            fails(handshake, servers)
    else:
        fails(handshake, servers)
    (refusal,) = servers.refusals()
    assert refusal.code is ErrorCode.PARITY
    assert says in refusal.reason
    assert servers.connected["a"].refused
    assert servers.errors == ["parity"]
    handshake.work()
    assert not servers.connected["a"].aligned, "it is not asked again"


def test_without_rows_every_server_is_aligned() -> None:
    servers = FakeServers("a")
    handshake_of(servers, []).work()
    assert servers.connected["a"].aligned


@pytest.mark.parametrize("verdict", ["accept_server", "refuse", "repeat"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_verdict_on_a_server_that_has_gone_meanwhile_is_about_nobody(
    items: list[PreparedTicket], verdict: str, comes_back: bool
) -> None:
    """It died while the learner compared its log-probs; what comes back in a new session has a check of its own."""
    servers = FakeServers("a", "b")
    handshake = handshake_of(servers, items)
    servers.publish(0)
    handshake.work()
    send_back(handshake, servers, "a", 0)
    (check,) = handshake.take_complete()
    del servers.connected["a"]
    handshake.work()
    if comes_back:
        hello = content.hello("a").model_copy(update={"session": "new"})
        servers.connected["a"] = ServerState(hello, b"x")
        handshake.work()
    sent = len(servers.tickets_of("a"))
    getattr(handshake, verdict)(check, *(("reason", "fix") if verdict == "refuse" else ()))
    handshake.work()
    assert len(servers.tickets_of("a")) == sent
    assert not check.server.aligned
    assert not any(server.aligned or server.refused for name, server in servers.connected.items() if name == "a")
