"""The ticket ledger: how many tickets are out, in which order groups are trained, and that none is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import BadStateError
from learner.tickets import MAX_ATTEMPTS, PreparedTicket, ReceivedGroup, TicketLedger
from protocol.messages import (
    FinishReason,
    Group,
    GroupTimings,
    Prompt,
    Sampling,
    Ticket,
    TicketKind,
    TrajectoryRecord,
    TrajectoryStatus,
)

SAMPLING = Sampling(max_new_tokens=4, stop_token_ids=(0,))


def prepared(ticket_id: int, version: int = 0, kind: TicketKind = TicketKind.TRAIN) -> PreparedTicket:
    prompt = Prompt(row_id=f"d:{ticket_id}", messages=())
    ticket = Ticket(
        ticket_id=ticket_id, kind=kind, prompt=prompt, group_size=1, seed=1, min_version=version, sampling=SAMPLING
    )
    return PreparedTicket(ticket, {})


def received(item: PreparedTicket, version: int | None = None) -> ReceivedGroup:
    """A group of one token, sampled at the version or the ticket's own."""
    record = TrajectoryRecord(status=TrajectoryStatus.FINISHED, finish_reason=FinishReason.STOP, reward=1.0, turns=())
    group = Group(
        ticket_id=item.ticket.ticket_id,
        server_id="s",
        prompt_ids=np.zeros(1, np.int32),
        image_grids=np.zeros((0, 3), np.int32),
        image_hashes=(),
        lengths=np.ones(1, np.int32),
        token_ids=np.zeros(1, np.int32),
        loss_mask=np.ones(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        versions=np.full(1, item.ticket.min_version if version is None else version, np.int32),
        trajectories=(record,),
        timings=GroupTimings(queued_s=0, generate_s=0, reward_s=0),
    )
    return ReceivedGroup(item, group)


def issue(ledger: TicketLedger, version: int) -> list[PreparedTicket]:
    items = [prepared(ticket_id, version) for ticket_id in ledger.admissible(version)]
    ledger.issue(items)
    return items


def ids(items: list[PreparedTicket]) -> list[int]:
    return [item.ticket.ticket_id for item in items]


@pytest.mark.parametrize("max_staleness", range(5))
def test_admission_capacity(max_staleness: int) -> None:
    per_step, steps = 8, 7
    ledger = TicketLedger(prompts_per_step=per_step, max_staleness=max_staleness, total_groups=steps * per_step)
    for version in range(steps):
        issue(ledger, version)
        expected = min((max_staleness + version + 1) * per_step, steps * per_step)
        assert ledger.counts().issued == expected
        assert not ledger.admissible(version), "nothing more before the next version"
        for item in ledger.waiting()[:per_step]:
            ledger.receive(received(item))
        taken = ledger.take(version)
        assert [group.ticket.ticket_id for group in taken] == list(range(version * per_step, (version + 1) * per_step))
    assert ledger.counts().trained == steps * per_step
    assert ledger.counts().residual == 0


def test_the_published_example_of_the_staleness_gate() -> None:
    ledger = TicketLedger(prompts_per_step=8, max_staleness=2, total_groups=1000)
    assert len(ledger.admissible(3)) == 48


def test_a_fast_server_never_makes_a_group_too_stale() -> None:
    """However late groups are taken, no token is older than the bound: the other groups wait with the step."""
    ledger = TicketLedger(prompts_per_step=2, max_staleness=1, total_groups=20)
    for version in range(10):
        issue(ledger, version)
        for item in ledger.waiting():
            ledger.receive(received(item))
        for group in ledger.take(version):
            assert version - group.ticket.min_version <= 1
    assert ledger.counts().residual == 0


def test_take_prefers_the_oldest() -> None:
    ledger = TicketLedger(prompts_per_step=2, max_staleness=2, total_groups=100)
    items = issue(ledger, 0)
    assert ids(items) == [0, 1, 2, 3, 4, 5]
    for place in (5, 3, 1, 0, 4, 2):
        ledger.receive(received(items[place]))
    assert [group.ticket.ticket_id for group in ledger.take(0)] == [0, 1]
    assert [group.ticket.ticket_id for group in ledger.take(1)] == [2, 3]


def test_a_step_waits_for_tickets_that_would_become_stale() -> None:
    ledger = TicketLedger(prompts_per_step=2, max_staleness=1, total_groups=100)
    first = issue(ledger, 0)  # 0 to 3, all of version 0: last chance is the step at version 1
    for place in (1, 2):
        ledger.receive(received(first[place]))
    assert ledger.ready(0), "0 and 3 can still be trained at version 1"
    ledger.take(0)
    second = issue(ledger, 1)
    for item in second:
        ledger.receive(received(item))
    assert not ledger.ready(1)
    assert [ticket_id for ticket_id, _, _ in ledger.blockers(1)] == [0, 3]
    ledger.assign([0], "server")
    assert [server for _, server, _ in ledger.blockers(1)] == ["server", None]
    ledger.receive(received(first[0]))
    assert not ledger.ready(1)
    ledger.receive(received(first[3]))
    assert ledger.ready(1)
    assert [group.ticket.ticket_id for group in ledger.take(1)] == [0, 3]


def test_a_stale_token_stops_the_run() -> None:
    ledger = TicketLedger(prompts_per_step=1, max_staleness=0, total_groups=10)
    (item,) = issue(ledger, 0)
    ledger.receive(received(item))
    ledger.take(0)
    (item,) = issue(ledger, 1)
    ledger.receive(received(item, version=0))
    with pytest.raises(BadStateError, match=r"ticket 1 has a token of version 0 at version 1: over max_staleness 0"):
        ledger.take(1)


def test_a_lost_server_returns_its_tickets() -> None:
    ledger = TicketLedger(prompts_per_step=4, max_staleness=0, total_groups=10)
    items = issue(ledger, 0)
    ledger.assign([0, 1], "a")
    ledger.assign([2], "b")
    assert (ledger.held_by("a"), ledger.held_by("b")) == (2, 1)
    assert ids(ledger.waiting()) == [3]
    ledger.receive(received(items[0]))
    assert ledger.lose_server("a") == 1
    assert ids(ledger.waiting()) == [1, 3]
    assert ledger.held_by("a") == 0
    counts = ledger.counts()
    assert (counts.waiting, counts.in_flight, counts.buffered, counts.residual) == (2, 1, 1, 0)


def test_losing_servers_is_not_the_ticket_s_fault() -> None:
    ledger = TicketLedger(prompts_per_step=1, max_staleness=0, total_groups=10)
    issue(ledger, 0)
    for _ in range(MAX_ATTEMPTS + 2):
        ledger.assign([0], "a")
        ledger.lose_server("a")
    assert ids(ledger.waiting()) == [0]


def test_a_ticket_that_keeps_failing_stops_the_run() -> None:
    ledger = TicketLedger(prompts_per_step=1, max_staleness=0, total_groups=10)
    issue(ledger, 0)
    assert MAX_ATTEMPTS == 3
    for _ in range(2):
        ledger.assign([0], "a")
        ledger.give_back(0, "out of memory")
        assert ids(ledger.waiting()) == [0]
    ledger.give_back(99, "not ours")
    with pytest.raises(BadStateError, match=r"ticket 0 \(row d:0\) failed 3 times: out of memory"):
        ledger.give_back(0, "out of memory")


def test_evaluation_is_counted_apart() -> None:
    ledger = TicketLedger(prompts_per_step=1, max_staleness=0, total_groups=10)
    issue(ledger, 0)
    evaluation = [prepared(10**6 + i, kind=TicketKind.EVAL) for i in range(3)]
    ledger.issue(evaluation)
    for item in reversed(evaluation):
        ledger.receive(received(item))
    assert ledger.evaluation_arrived() == 3
    assert ledger.counts().issued == 1
    assert [group.ticket.ticket_id for group in ledger.take_evaluation()] == [10**6, 10**6 + 1, 10**6 + 2]
    assert ledger.evaluation_arrived() == 0
    assert ids(ledger.waiting()) == [0]
    assert [ticket_id for ticket_id, _, _ in ledger.blockers(0)] == [0]


def test_a_group_that_is_no_longer_awaited_is_unknown() -> None:
    ledger = TicketLedger(prompts_per_step=1, max_staleness=0, total_groups=10)
    (item,) = issue(ledger, 0)
    assert ledger.outstanding(0) is item
    ledger.receive(received(item))
    assert ledger.outstanding(0) is None


def test_a_checkpoint_issues_exactly_the_unfinished_again() -> None:
    ledger = TicketLedger(prompts_per_step=2, max_staleness=2, total_groups=12)
    items = issue(ledger, 0)
    for place in (0, 2, 4):
        ledger.receive(received(items[place]))
    ledger.take(0)  # 0 and 2; 4 is buffered, 1, 3 and 5 are out
    again = TicketLedger(prompts_per_step=2, max_staleness=2, total_groups=12)
    again.restore(ledger.state())
    assert again.counts().trained == again.counts().issued == 2
    assert again.admissible(1) == [1, 3, 4, 5, 6, 7]
    issue(again, 1)
    assert again.admissible(1) == []
    assert again.counts().residual == 0
    # A second stop before anything came back keeps them all.
    third = TicketLedger(prompts_per_step=2, max_staleness=2, total_groups=12)
    third.restore(again.state())
    assert third.admissible(1) == [1, 3, 4, 5, 6, 7]
    trained = [0, 2]
    for version in range(1, 6):
        issue(third, version)
        for item in third.waiting():
            third.receive(received(item, version))
        trained += [group.ticket.ticket_id for group in third.take(version)]
    assert sorted(trained) == list(range(12))
    assert third.counts().residual == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    steps=st.integers(1, 6),
)
def test_nothing_is_lost_or_doubled(seed: int, per_step: int, max_staleness: int, steps: int) -> None:
    """Random issues, assignments, arrivals, lost servers, failures and restarts: every group is trained once."""
    rng = random.Random(seed)
    shape = {"prompts_per_step": per_step, "max_staleness": max_staleness, "total_groups": steps * per_step}
    ledger = TicketLedger(**shape)
    version, trained = 0, []
    failures: dict[int, int] = {}
    for _ in range(2000):
        if version == steps:
            break
        choice = rng.choice(["issue", "assign", "receive", "receive", "lose", "fail", "restart", "step", "step"])
        waiting = ledger.waiting()
        if choice == "issue":
            issue(ledger, version)
        elif choice == "assign" and waiting:
            ledger.assign(ids(rng.sample(waiting, rng.randint(1, len(waiting)))), rng.choice("ab"))
        elif choice == "receive" and waiting:
            item = rng.choice(waiting)
            ledger.receive(received(item, rng.randint(item.ticket.min_version, version)))
        elif choice == "lose":
            ledger.lose_server(rng.choice("ab"))
        elif choice == "fail" and waiting:
            ticket_id = rng.choice(waiting).ticket.ticket_id
            failures[ticket_id] = failures.get(ticket_id, 0) + 1
            if failures[ticket_id] < MAX_ATTEMPTS:
                ledger.give_back(ticket_id, "scripted")
        elif choice == "restart" and rng.random() < 0.2:
            state = ledger.state()
            ledger = TicketLedger(**shape)
            ledger.restore(state)
            failures = {}
        elif choice == "step" and ledger.ready(version):
            groups = ledger.take(version)
            assert len(groups) == per_step
            assert all(version - int(group.group.versions.min()) <= max_staleness for group in groups)
            trained += [group.ticket.ticket_id for group in groups]
            version += 1
        counts = ledger.counts()
        assert counts.residual == 0
        assert min(counts.waiting, counts.in_flight, counts.buffered) >= 0
        assert counts.issued <= (max_staleness + version + 1) * per_step
    while version < steps:  # whatever the dice left undone
        ledger.lose_server("a")
        ledger.lose_server("b")
        issue(ledger, version)
        for item in ledger.waiting():
            ledger.receive(received(item, version))
        trained += [group.ticket.ticket_id for group in ledger.take(version)]
        version += 1
    assert sorted(trained) == list(range(steps * per_step))
