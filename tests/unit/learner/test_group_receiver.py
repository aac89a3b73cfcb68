"""The learner's answers to a group, by the ticket that it names."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from asyncrl.data.survey.held_out import EVALUATION_IDS
from asyncrl.environments.recording import LAST_TRAJECTORIES, EnvironmentHealth
from asyncrl.errors import BadStateError
from asyncrl.journal.writer import TicketSlot
from learner.network.group_receiver import GroupReceiver
from learner.network.servers import Servers
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_writer import PARITY_IDS
from protocol.errors import ErrorCode
from protocol.messages import Ack, Error, FinishReason, TicketKind, TrajectoryRecord, TrajectoryStatus, Turn
from tests.rigs.fuzz import content
from tests.unit.learner.test_tickets import issue, make_ledger, prepared, received


class Connected:
    """Keeps what is sent to the servers."""

    version = 0

    def __init__(self, *server_ids: str) -> None:
        self.connected = dict.fromkeys(server_ids)
        self.errors: Counter[str] = Counter()
        self.sent: list[tuple[str, Any]] = []

    def send(self, server_id: str, message: Any) -> bool:
        self.sent.append((server_id, message))
        return True

    def acknowledged(self) -> list[tuple[str, int]]:
        return [(to, ticket_id) for to, m in self.sent if isinstance(m, Ack) for ticket_id in m.ticket_ids]


def receiver_of(ledger: TicketLedger, *server_ids: str) -> tuple[GroupReceiver, Connected]:
    servers, no_sockets = Connected(*server_ids), cast(Any, None)
    return GroupReceiver(cast(Servers, servers), no_sockets, ledger, lambda *_, **__: None), servers


def test_of_two_groups_that_come_at_once_the_first_counts_and_both_are_acknowledged() -> None:
    ledger = make_ledger(1, 0, 1)
    issue(ledger, 0)
    for server_id in ("a", "b"):
        ledger.out.assign([0], server_id)
    groups, servers = receiver_of(ledger, "a", "b")
    for server_id in ("b", "a", "b"):
        groups.accept(server_id, content.group(0, 0, server_id), ())
    assert servers.acknowledged() == [], "not before it is in the journal"
    groups.keep()
    assert servers.acknowledged() == [("b", 0), ("a", 0)]
    assert (ledger.out.held_by("a"), ledger.out.held_by("b"), ledger.out.duplicates) == (0, 0, 1)
    assert [taken.group.server_id for taken in ledger.take()] == ["b"]


@pytest.mark.parametrize("ticket_id", [2, EVALUATION_IDS + 1, EVALUATION_IDS + 10**9, PARITY_IDS, 2**63 - 1])
def test_a_group_for_a_ticket_that_was_never_issued_is_told_so(ticket_id: int) -> None:
    ledger = make_ledger(2, 0, 10)
    issued = [*issue(ledger, 0), prepared(TicketSlot(EVALUATION_IDS, 0, 0, 0), TicketKind.EVAL)]
    ledger.issue(issued[2:])
    groups, servers = receiver_of(ledger, "a")
    group = content.group(0, 0, "a")
    groups.accept("a", group.model_copy(update={"ticket_id": ticket_id}), ())
    ((_, answer),) = servers.sent
    assert isinstance(answer, Error)
    assert (answer.code, answer.ticket_id) == (ErrorCode.UNKNOWN_TICKET, ticket_id)
    for item in issued:
        ledger.receive([received(item)])
        groups.accept("a", group.model_copy(update={"ticket_id": item.ticket.ticket_id}), ())
    assert servers.acknowledged() == [("a", item.ticket.ticket_id) for item in issued], "duplicates"


def ended(error_kind: str = "", message: str = "") -> TrajectoryRecord:
    return TrajectoryRecord(
        status=TrajectoryStatus.ERROR if error_kind else TrajectoryStatus.FINISHED,
        finish_reason=FinishReason.STOP,
        error_kind=error_kind,
        error_message=message,
        reward=None if error_kind else 1.0,
        turns=(Turn(start=0, end=1),),
    )


LOST = ended("environment_exception", "ConnectionRefusedError: search:8080")


def test_a_dead_environment_ends_the_run_after_its_groups_are_kept() -> None:
    ledger = make_ledger(1, 0, 1)
    issue(ledger, 0)
    ledger.out.assign([0], "a")
    groups, servers = receiver_of(ledger, "a")
    groups.health.observe([LOST] * 99 + [ended("environment_died")])
    group = content.group(0, 0, "a")
    groups.accept("a", group.model_copy(update={"trajectories": (*group.trajectories[:-1], LOST)}), ())
    with pytest.raises(
        BadStateError,
        match=r"in 101 of the last \d+ trajectories \(100 environment_exception, 1 "
        r"environment_died\); the newest says: ConnectionRefusedError: search:8080",
    ):
        groups.keep()
    assert servers.acknowledged() == [("a", 0)]
    assert ledger.take()[0].group.ticket_id == 0


def test_an_environment_that_fails_seldom_is_warned_of_once_and_one_that_fails_often_at_times_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = EnvironmentHealth()
    health.observe([*[LOST] * 10, *[ended("reward_exception")] * 190])
    assert not caplog.records, "5 % are not above 5 %, and a reward is no environment"
    for _ in range(3):
        health.observe([*[LOST] * 100, *[ended()] * (LAST_TRAJECTORIES - 100)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
