"""The parity handshake: only a server whose parity groups were accepted gets work."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.errors import BadStateError
from asyncrl.journal.writer import TicketSlot
from learner.network.parity_handshake import ParityCheck, ParityHandshake
from learner.network.servers import ModelFacts, Servers, ServerState
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_writer import PARITY_IDS
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Ack, Group, Refusal, TicketFailed, Tickets, WeightsLoaded
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import small_config, write_ticket
from tests.rigs.journal_groups import throwaway_journal
from tests.rigs.unconnected import Ports


class Rig(ParityHandshake):
    """The handshake of servers without sockets, with two rows."""

    def __init__(self, *names: str, rows: int = 2, deadline_s: float = 60.0):
        def check(group: Group, ticket: Any, facts: Any, **_: Any) -> None:
            if not content.is_right(group.model_copy(update={"ticket_id": ticket.seed})):
                raise ProtocolError(ErrorCode.REFUSED_GROUP, f"row {ticket.prompt.row_id}: wrong")

        self.ports = Ports()
        ledger = TicketLedger(throwaway_journal(), prompts_per_step=1, bound=0, total_groups=1)
        servers = Servers(
            small_config().network,
            small_config().trainer.mode,
            small_config().rollout.quantization,
            "run",
            cast(Any, self.ports),
            ledger,
            ModelFacts("m", "p", 9),
        )
        super().__init__(
            servers, ledger, [write_ticket(TicketSlot(i, i, 0, 0)) for i in range(rows)], check, deadline_s
        )
        for name in names:
            self.connect(name)

    def connect(self, name: str, **hello: str) -> ServerState:
        state = ServerState(content.hello(name).model_copy(update=hello), name.encode())
        self.servers.connected[name] = state
        return state

    def publish(self, version: int) -> None:
        self.servers.manifest = cast(Any, SimpleNamespace(version=version))
        self.work()

    def is_checking(self, name: str) -> bool:
        return name in self._checks

    def sent(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in self.ports.sent if isinstance(message, kind)]

    def tickets_of(self, name: str) -> list[Any]:
        return [t for to, m in self.ports.sent if to == name.encode() and isinstance(m, Tickets) for t in m.tickets]

    def send_back(self, name: str, version: int) -> None:
        for ticket in self.tickets_of(name)[-2:]:
            assert self.awaits(name, ticket.ticket_id)
            right = content.group(ticket.seed, version, name)
            self.accept_group(name, right.model_copy(update={"ticket_id": ticket.ticket_id}))

    def checked(self, name: str, version: int = 0) -> ParityCheck:
        """The check of a server that has answered."""
        self.publish(version)
        self.send_back(name, version)
        return self.take_complete()[0]


def test_a_server_gets_work_only_when_its_parity_groups_are_accepted() -> None:
    rig = Rig("a")
    server = rig.servers.connected["a"]
    rig.work()
    assert not rig.ports.sent, "nothing is published yet"
    rig.publish(3)
    rig.work()
    sent = rig.tickets_of("a")
    assert [ticket.min_version for ticket in sent] == [3, 3]
    assert min(ticket.ticket_id for ticket in sent) >= PARITY_IDS
    assert rig.holds_step is None, "a server that has no weights yet takes its time"
    server.loaded = WeightsLoaded(version=3, channel="shm", transfer_s=0, load_s=0)
    assert rig.holds_step == "a"
    assert not rig.awaits("b", sent[0].ticket_id), "another server's"
    assert not rig.take_complete()
    rig.send_back("a", 3)
    assert len(rig.sent(Ack)) == 2
    (check,) = rig.take_complete()
    assert rig.holds_step == "a"
    assert not server.aligned
    rig.accept_server(check)
    assert (server.aligned, rig.holds_step) == (True, None)


def test_groups_of_an_older_version_are_asked_for_again() -> None:
    rig = Rig("a")
    check = rig.checked("a")
    rig.publish(1)
    rig.repeat(check)
    tickets = rig.tickets_of("a")
    assert [ticket.min_version for ticket in tickets] == [0, 0, 1, 1]
    assert len({ticket.ticket_id for ticket in tickets}) == 4
    assert [t.seed for t in tickets[2:]] == [t.seed for t in tickets[:2]]


def test_a_reconnection_is_not_checked_again_and_a_new_process_is() -> None:
    rig = Rig("a")
    rig.accept_server(rig.checked("a"))
    for session, aligned in (("session-of-a", True), ("another", False)):
        server = rig.connect("a", session=session)
        rig.work()
        assert server.aligned is aligned


def test_a_server_that_still_holds_tickets_is_checked_when_they_are_done() -> None:
    """Beside them, the parity rows would move the last bits of a training group."""
    rig = Rig("a")
    rig.ledger.issue([write_ticket(slot) for slot in rig.ledger.admissible(0)])
    rig.ledger.out.assign([0], "a")
    rig.publish(0)
    assert not rig.ports.sent
    rig.ledger.out.reconcile("a")
    rig.work()
    assert len(rig.tickets_of("a")) == 2


# --- checks after updates ---------------------------------------------------------------------------


def _passes(rig: Rig, version: int) -> bool:
    """Publish a version, and answer the check that begins, if one does."""
    rig.servers.connected["a"].told = version
    rig.publish(version)
    if not rig.is_checking("a"):
        return False
    assert not rig.servers.connected["a"].aligned, "no new work until it has passed"
    rig.send_back("a", version)
    rig.accept_server(rig.take_complete()[0])
    assert rig.servers.connected["a"].aligned
    return True


def test_a_server_is_checked_again_after_its_first_update_and_then_ever_more_rarely() -> None:
    rig = Rig("a")
    rig.accept_server(rig.checked("a"))
    assert [version for version in range(1, 40) if _passes(rig, version)] == [1, 3, 7, 15, 31]
    rig.check_again()
    assert [version for version in range(40, 60) if _passes(rig, version)] == [40, 41, 43, 47, 55]


def test_a_server_that_keeps_versions_in_its_cache_is_checked_once() -> None:
    rig = Rig("a")
    rig.accept_server(rig.checked("a"), once=True)
    assert not any(_passes(rig, version) for version in range(1, 40))


@pytest.mark.parametrize("bound", [0, 1])
def test_a_server_at_work_is_checked_again_off_policy_alone(bound: int) -> None:
    """Beside the parity rows the last bits of a training group are others, which on policy are a run's own."""
    rig = Rig("a")
    rig.accept_server(rig.checked("a"))
    rig.ledger.bound = bound
    rig.ledger.issue([write_ticket(slot) for slot in rig.ledger.admissible(0)])
    rig.ledger.out.assign([0], "a")
    rig.servers.connected["a"].told = 1
    rig.publish(1)
    assert rig.is_checking("a") == bool(bound)
    rig._last_turn_at -= 2 * rig.deadline_s
    rig.work()
    assert not rig.servers.connected["a"].refused, "what it does first takes as long as it takes"
    if bound:
        rig.send_back("a", 1)
        rig.accept_server(rig.take_complete()[0])
    assert rig.servers.connected["a"].aligned


def test_an_evaluation_keeps_the_servers_of_its_version() -> None:
    rig = Rig("a")
    rig.accept_server(rig.checked("a"))
    rig.ledger.evaluation = cast(Any, object())
    assert not _passes(rig, 1)
    rig.ledger.evaluation = None
    rig.servers.connected["a"].told = 0
    rig.publish(2)
    assert rig.servers.connected["a"].aligned, "it has not been told of the version"
    assert _passes(rig, 2)


def test_without_rows_every_server_is_aligned() -> None:
    rig = Rig("a", rows=0)
    rig.work()
    assert rig.servers.connected["a"].aligned


def _mismatch(rig: Rig) -> None:
    rig.send_back("a", 0)
    rig.refuse(rig.take_complete()[0], "they differ by 0.5 nats", "fix it")


def _wrong_group(rig: Rig) -> None:
    wrong = content.group(17, 0, "a").model_copy(update={"ticket_id": rig.tickets_of("a")[0].ticket_id})
    rig.accept_group("a", wrong)


def _failure(rig: Rig) -> None:
    number = rig.tickets_of("a")[-1].ticket_id
    rig.fail_ticket("a", TicketFailed(ticket_id=number, error_kind="Broken", error_message="no memory"))


def _silence(rig: Rig) -> None:
    rig._last_turn_at -= 10.0
    rig.work()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (_mismatch, "they differ by 0.5 nats"),
        (_wrong_group, "row fuzz:0: wrong"),
        (_failure, "row fuzz:1 from a failed: Broken: no memory"),
        (_silence, "it has not answered its parity tickets for 1 s"),
    ],
)
def test_a_server_that_fails_is_refused_and_the_only_one_ends_the_run(
    fails: Callable[[Rig], None], says: str, alone: bool
) -> None:
    rig = Rig("a", deadline_s=1.0) if alone else Rig("a", "b", deadline_s=1.0)
    rig.publish(0)
    if alone:
        with pytest.raises(BadStateError, match=f"server 'a' is refused: {says}.*No other rollout server is connected"):
            fails(rig)
    else:
        rig.send_back("b", 0)
        fails(rig)
    (refusal,) = rig.sent(Refusal)
    assert refusal.code is ErrorCode.PARITY
    assert says in refusal.reason
    assert rig.servers.errors == {"parity": 1}
    rig.work()
    server = rig.servers.connected["a"]
    assert (server.refused, server.aligned) == (True, False), "it is not asked again"


@pytest.mark.parametrize("verdict", ["accept_server", "refuse", "repeat"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_verdict_on_a_server_that_has_gone_meanwhile_changes_nothing(verdict: str, comes_back: bool) -> None:
    """It died while the learner compared its log-probs; what comes back in a new session has a check of its own."""
    rig = Rig("a", "b")
    check = rig.checked("a")
    del rig.servers.connected["a"]
    rig.work()
    if comes_back:
        rig.connect("a", session="new")
        rig.work()
    sent = len(rig.tickets_of("a"))
    getattr(rig, verdict)(check, *(("reason", "fix") if verdict == "refuse" else ()))
    rig.work()
    assert len(rig.tickets_of("a")) == sent
    assert not any(s.aligned or s.refused for s in (check.server, *rig.servers.connected.values()))
