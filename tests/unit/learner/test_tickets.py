"""The ticket ledger: how many tickets are out, in which order groups are trained, and that none is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.service_sections import OnStale
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.assignments import MAX_ATTEMPTS
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_deadline import TicketDeadline
from learner.training.prompts_ahead import MOST_BYTES, PromptsAhead
from protocol.messages import PartialRollout, TicketKind
from tests.rigs.fuzz import content
from tests.rigs.journal_groups import throwaway_journal


def make_ledger(per_step: int, bound: int, total: int, on_stale: OnStale = "wait", **more: Any) -> TicketLedger:
    shape = {"prompts_per_step": per_step, "bound": bound, "total_groups": total}
    return TicketLedger(throwaway_journal(), **shape, on_stale=on_stale, **more)


def prepared(slot: TicketSlot, kind: TicketKind = TicketKind.TRAIN) -> PreparedTicket:
    """The ticket of a position in the data."""
    update = {"ticket_id": slot.ticket_id, "kind": kind}
    ticket = content.ticket(slot.position, slot.version).model_copy(update=update)
    ids, types = content.prompt_ids(slot.position), np.zeros_like(content.prompt_ids(slot.position))
    measured = EncodedPrompt("row", ids, types, content.IMAGE_GRIDS, ticket.prompt.image_hashes)
    return PreparedTicket(ticket, dict([content.image(slot.position)]), slot, measured)


def received(item: PreparedTicket, *versions: int, server_id: str = "s") -> ReceivedGroup:
    """A group of one trajectory, its tokens sampled at these versions, or one token at the ticket's own."""
    sampled = np.asarray(versions or (item.ticket.min_version,), np.int32)
    update = {"ticket_id": item.ticket.ticket_id, "versions": sampled}
    group = content.group(item.slot.position, 0, server_id, [sampled.size])
    return ReceivedGroup(item, group.model_copy(update=update))


def issue(ledger: TicketLedger, version: int) -> list[PreparedTicket]:
    items = [prepared(slot) for slot in ledger.admissible(version)]
    ledger.issue(items)
    return items


def arrive(ledger: TicketLedger, item: PreparedTicket, *versions: int, server_id: str = "s") -> None:
    ledger.receive([received(item, *versions, server_id=server_id)])


def step(ledger: TicketLedger) -> list[ReceivedGroup]:
    """One learner step: its groups are taken, and the version moves."""
    taken = ledger.take()
    ledger.advance(ledger.version + 1)
    return taken


def ids(items: list[PreparedTicket]) -> list[int]:
    return [item.ticket.ticket_id for item in items]


def taken_ids(ledger: TicketLedger) -> list[int]:
    return [group.ticket.ticket_id for group in step(ledger)]


def positions(groups: list[ReceivedGroup]) -> list[int]:
    return [group.slot.position for group in groups]


@pytest.mark.parametrize("max_staleness", range(5))
def test_admission_capacity(max_staleness: int) -> None:
    per_step, steps = 8, 7
    ledger = make_ledger(per_step, max_staleness, steps * per_step)
    for version in range(steps):
        issue(ledger, version)
        expected = min((max_staleness + version + 1) * per_step, steps * per_step)
        assert ledger.counts().issued == expected
        assert not ledger.admissible(version), "nothing more before the next version"
        for item in ledger.out.waiting()[:per_step]:
            arrive(ledger, item)
        assert taken_ids(ledger) == list(range(version * per_step, (version + 1) * per_step))
    assert ledger.counts().trained == steps * per_step
    assert ledger.counts().residual == 0


def test_a_step_waits_for_tickets_that_would_become_stale() -> None:
    ledger = make_ledger(2, 1, 100)
    first = issue(ledger, 0)  # 0 to 3, all of version 0: last chance is the step at version 1
    for place in (1, 2):
        arrive(ledger, first[place])
    assert ledger.ready(), "0 and 3 can still be trained at version 1"
    step(ledger)
    for item in issue(ledger, 1):
        arrive(ledger, item)
    assert not ledger.ready()
    assert [ticket_id for ticket_id, _, _ in ledger.blockers()] == [0, 3]
    ledger.out.assign([0], "server")
    assert [server for _, server, _ in ledger.blockers()] == ["server", None]
    arrive(ledger, first[0])
    assert not ledger.ready()
    arrive(ledger, first[3])
    assert ledger.ready()
    assert taken_ids(ledger) == [0, 3]


def test_a_stale_token_stops_the_run() -> None:
    ledger = make_ledger(1, 0, 10)
    arrive(ledger, *issue(ledger, 0))
    step(ledger)
    (item,) = issue(ledger, 1)
    arrive(ledger, item, 0)
    with pytest.raises(BadStateError, match=r"ticket 1 has a token of version 0 at version 1: over the"):
        ledger.take()


def test_drop_goes_on_without_stragglers_and_issues_their_prompts_again() -> None:
    ledger = make_ledger(2, 1, 6, "drop")
    first = issue(ledger, 0)
    arrive(ledger, first[0])
    arrive(ledger, first[1])
    assert positions(step(ledger)) == [0, 1]
    second = issue(ledger, 1)
    assert ids(second) == [4, 5]
    arrive(ledger, first[3], 0, 0, 1)
    arrive(ledger, second[1])
    assert ledger.ready(), "2 is the last chance of nobody: drop does not wait"
    assert positions(step(ledger)) == [3, 5]
    arrive(ledger, first[2], 0, 1)  # a token of version 0 at version 2
    counts = ledger.counts()
    assert (counts.dropped, counts.buffered, counts.residual) == ({"stale": 1}, 0, 0)
    (again,) = issue(ledger, 2)
    assert (again.slot.ticket_id, again.slot.position) == (6, 2), "a new ticket for the same prompt"
    arrive(ledger, again)
    arrive(ledger, second[0])
    assert positions(step(ledger)) == [4, 2]
    counts = ledger.counts()
    assert (counts.issued, counts.trained, counts.dropped, counts.residual) == (7, 6, {"stale": 1}, 0)
    assert ledger.length_bias()["length/dropped"] == 2
    # Trained: 1 + 1 + 3 + 1 + 1 + 1 tokens in 6 trajectories; finished: 10 tokens in 7.
    assert ledger.length_bias()["length_bias"] == pytest.approx((8 / 6) / (10 / 7) - 1)


def test_mask_trains_the_fresh_tokens_of_a_straggler() -> None:
    ledger = make_ledger(1, 1, 3, "mask")
    first = issue(ledger, 0)
    arrive(ledger, first[1])
    step(ledger)
    arrive(ledger, *issue(ledger, 1))
    step(ledger)
    arrive(ledger, first[0], 0, 0, 1, 2)
    (group,) = step(ledger)
    assert group.group.is_sampled.tolist() == [False, False, True, True]
    assert ledger.counts().dropped == {"stale": 0}
    assert ledger.length_bias()["length_bias"] == pytest.approx(4 / 6 - 1)


def test_short_groups_that_arrive_first_are_no_length_bias() -> None:
    """What waits in the buffer is short: its long mates have not arrived yet."""
    ledger = make_ledger(2, 1, 6)
    first = issue(ledger, 0)
    for item, length in zip(first, (1, 1, 1, 9), strict=True):
        if length == 1:
            arrive(ledger, item, *[0] * length)
    step(ledger)
    assert ledger.length_bias() == {"length/trained": 1, "length/buffered": 1, "length_bias": 0}
    arrive(ledger, first[3], *[0] * 9)
    step(ledger)
    assert ledger.length_bias() == {"length/trained": 3, "length_bias": 0}


def test_on_policy_a_batch_that_a_lost_server_began_is_sampled_again_as_a_whole() -> None:
    ledger = make_ledger(3, 0, 6)
    items = issue(ledger, 0)
    assert ledger.batch_mates(items) == [], "the first time it goes out whole by itself"
    arrive(ledger, items[1])
    assert ids(ledger.batch_mates([items[0], items[2]])) == [1]
    off_policy = make_ledger(3, 1, 6)
    first = issue(off_policy, 0)
    arrive(off_policy, first[1])
    assert off_policy.batch_mates([first[0], first[2]]) == []


def test_a_server_that_reconnects_keeps_what_it_holds_and_a_lost_one_keeps_nothing() -> None:
    ledger = make_ledger(4, 0, 10)
    items = issue(ledger, 0)
    ledger.out.assign([0, 1], "a")
    ledger.out.assign([2], "b")
    assert ledger.out.reconcile("a", [1, 2, 3, 99]) == 1, "3 waited for somebody; 2 is with b, too; 99 is not ours"
    assert (ledger.out.held_by("a"), ledger.out.held_by("b")) == (3, 1)
    assert ids(ledger.out.waiting()) == [0]
    arrive(ledger, items[1])
    assert ledger.out.get(1) is None
    assert ledger.was_issued(1)
    assert not ledger.was_issued(4), "what it sends again is a duplicate, or another run's"
    assert ledger.out.reconcile("a") == 0
    assert ids(ledger.out.waiting()) == [0, 3]
    counts = ledger.counts()
    assert (counts.waiting, counts.in_flight, counts.buffered, counts.residual) == (2, 1, 1, 0)


def test_a_ticket_that_comes_back_keeps_what_was_sampled_of_it() -> None:
    ledger = make_ledger(1, 1, 2)
    slot = ledger.admissible(0)[0]
    item = prepared(slot)
    item = replace(item, ticket=item.ticket.model_copy(update={"group_size": 3, "requests": ()}))
    ledger.issue([item])
    out = ledger.out

    def sampled(*lengths: int) -> PartialRollout:
        count = sum(lengths)
        numbers = np.full(count, slot.version, np.int32)
        ids = np.full(count, 20, np.int32)
        return PartialRollout(
            lengths=np.asarray(lengths, np.int32), token_ids=ids, logprobs=np.zeros(count, np.float32), versions=numbers
        )

    out.assign([0], "a")
    out.assign([0], "b")
    assert out.held(is_training=True) == {"a": 1, "b": 1}
    assert not out.take_return(0, "c", sampled(1, 1, 1)), "it does not hold the ticket"
    assert out.take_return(0, "b", sampled(0, 1, 2))
    assert (out.returned, out.returned_tokens) == (1, 3)
    assert out.waiting() == [], "a works on"
    assert out.take_return(0, "a", sampled(2, 0, 1))
    (waiting,) = out.waiting()
    assert waiting.ticket.partial is not None
    assert waiting.ticket.partial.lengths.tolist() == [2, 1, 2]
    assert ledger.counts().residual == 0
    out.assign([0], "d")
    with pytest.raises(ValueError, match="2 partial trajectories"):
        out.take_return(0, "d", sampled(1, 1))
    arrive(ledger, item, server_id="d")
    assert ledger.counts().buffered == 1


class AtOnce(TicketDeadline):
    """Every ticket is late as soon as a server has it."""

    def seconds(self, kind: TicketKind) -> float:
        return -1.0


def test_a_late_ticket_goes_to_another_server_and_the_second_group_is_a_duplicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("learner.tickets.assignments.time", SimpleNamespace(monotonic=lambda: now_s))
    ledger = make_ledger(3, 0, 3, deadline=TicketDeadline(least_s=5.0, unmeasured_s=300.0))
    out, items = ledger.out, issue(ledger, 0)
    out.assign([0, 1], "slow")
    out.assign([2], "good")
    now_s += 10.0
    assert (out.overdue(), out.stalled()) == ([], set()), "nothing is measured: it may take long"
    arrive(ledger, items[2], server_id="good")
    assert (out.overdue(), out.stalled()) == ([], set()), "3 times 10 s"
    now_s += 21.0
    out.forgive(15.0)
    assert (out.overdue(), out.stalled()) == ([], set()), "this process stood still for most of it"
    now_s += 15.0
    assert ids(out.overdue()) == [0, 1]
    assert out.stalled() == {"slow"}
    assert not out.may_try(0, "slow", ["slow", "good"]), "it has it"
    assert out.assign([0, 1], "good") == {0: "slow", 1: "slow"}
    assert [holders for _, holders, _ in ledger.blockers()] == ["slow, good"] * 2
    assert out.overdue() == [], "the other one has its time"
    arrive(ledger, items[0], server_id="good")
    arrive(ledger, items[1], server_id="slow")
    assert (out.held_by("slow"), out.held_by("good")) == (1, 1), "each still works on what the other has answered"
    assert out.stalled() == set(), "it has just answered one"
    out.take_duplicate(0, "slow")
    out.take_duplicate(0, "slow")
    assert out.give_back(1, "good", "out of memory", ["slow", "good"]), "nobody needs it any more"
    assert (out.held_by("slow"), out.held_by("good")) == (0, 0)
    assert (out.reissued, out.duplicates) == (2, 1)
    assert positions(step(ledger)) == [0, 1, 2]


def test_the_deadline_follows_what_recent_groups_took_and_never_falls_below_its_floor() -> None:
    deadline = TicketDeadline(least_s=30.0, unmeasured_s=300.0)
    kind = TicketKind.TRAIN
    assert deadline.seconds(kind) == 300.0
    deadline.measure(kind, 1.0)
    assert deadline.seconds(kind) == 30.0
    for seconds in range(1, 101):
        deadline.measure(kind, float(seconds))
    assert deadline.seconds(kind) == 3 * 95.0, "three times the quantile 0.95"
    assert deadline.seconds(TicketKind.EVAL) == 300.0, "measured apart"
    for _ in range(256):
        deadline.measure(kind, 20.0)
    assert deadline.seconds(kind) == 60.0, "the long ones are forgotten"


def test_a_ticket_that_keeps_failing_stops_the_run() -> None:
    ledger = make_ledger(1, 0, 10)
    issue(ledger, 0)
    assert MAX_ATTEMPTS == 3
    for _ in range(2):
        ledger.out.assign([0], "a")
        ledger.out.give_back(0, "a", "out of memory", ["a"])
        assert ids(ledger.out.waiting()) == [0]
    ledger.out.assign([0], "a")
    ledger.out.give_back(99, "a", "not ours", ["a"])
    ledger.out.give_back(0, "b", "another server's", ["b"])
    with pytest.raises(BadStateError, match=r"ticket 0 \(row fuzz:0\) failed 3 times: out of memory"):
        ledger.out.give_back(0, "a", "out of memory", ["a"])


def test_evaluation_is_counted_apart() -> None:
    ledger = make_ledger(1, 0, 10)
    issue(ledger, 0)
    evaluation = [prepared(TicketSlot(2**40 + i, i, 0, 0), TicketKind.EVAL) for i in range(3)]
    ledger.evaluation = Evaluation(0, 0, 3, lambda index, version: evaluation[index], ledger.changed)
    ledger.issue(list(ledger.evaluation.tickets(3)))
    groups = [received(item) for item in evaluation]
    for group in reversed(groups):
        ledger.receive([group])
    assert ledger.counts().issued == 1
    assert ledger.evaluation.is_complete
    in_row_order = [group.group.trajectories for group in groups]
    assert all(a is b for a, b in zip(ledger.evaluation.records(), in_row_order, strict=True))
    assert ids(ledger.out.waiting()) == [0]
    assert [ticket_id for ticket_id, _, _ in ledger.blockers()] == [0]


def test_after_a_restart_a_journaled_group_must_be_of_the_prompt_that_its_ticket_has() -> None:
    """Else completions of one prompt would be trained under another, without a word."""
    ledger = make_ledger(2, 0, 4)
    issue(ledger, 0)
    for item in ledger.out.waiting():
        arrive(ledger, item, 0)

    def rewritten(slot: TicketSlot) -> PreparedTicket:
        item = prepared(slot)
        return replace(item, measured=replace(item.measured, token_ids=item.measured.token_ids + 1))

    again = TicketLedger(ledger.journal, prompts_per_step=2, bound=0, total_groups=4)
    with pytest.raises(UserError, match="ticket 0 was not sampled from row fuzz:0 as it is now: prompt ids differ"):
        again.recover(rewritten, withhold_s=0.0)
    changed = TicketLedger(ledger.journal, prompts_per_step=2, bound=0, total_groups=4)
    changed.recover(
        lambda slot: rewritten(slot) if slot.position else prepared(slot), withhold_s=0.0, drop_changed=True
    )
    counts = changed.counts()
    assert (counts.buffered, counts.dropped["stale"], counts.residual) == (1, 1, 0)
    assert [slot.position for slot in changed.admissible(0)] == [1], "its position is issued again"
    ledger = make_ledger(2, 0, 4)
    issue(ledger, 0)
    for item in ledger.out.waiting():
        arrive(ledger, item, 0)
    step(ledger)
    again = TicketLedger(ledger.journal, prompts_per_step=2, bound=0, total_groups=4)
    with pytest.raises(UserError, match="not sampled from row fuzz:0"):
        again.take_again(1, rewritten)
    assert len(again.take_again(1, prepared)) == 2
    one_changed = lambda slot: rewritten(slot) if slot.position else prepared(slot)  # noqa: E731
    assert [item.slot.position for item in again.take_again(1, one_changed, drop_changed=True)] == [0]
    with pytest.raises(UserError, match="the rows of all 2 groups of a step have changed"):
        again.take_again(1, rewritten, drop_changed=True)


def test_tickets_of_before_a_restart_are_withheld_for_their_servers() -> None:
    ledger = make_ledger(2, 0, 4)
    issue(ledger, 0)
    again = TicketLedger(ledger.journal, prompts_per_step=2, bound=0, total_groups=4)
    again.recover(prepared, withhold_s=60.0)
    assert again.out.waiting() == []
    assert again.out.reconcile("a", [1]) == 1
    assert again.out.held_by("a") == 1
    again.recover(prepared, withhold_s=60.0)
    assert again.counts().issued == 2, "recovering twice changes nothing"


EVENTS = (
    *("issue", "assign", "again", "again", "receive", "answer", "answer", "answer", "lose", "reconnect", "fail"),
    *("restart", "step", "step"),
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    steps=st.integers(1, 6),
    on_stale=st.sampled_from(["wait", "drop", "mask"]),
)
def test_nothing_is_lost_or_doubled(
    seed: int, per_step: int, max_staleness: int, steps: int, on_stale: OnStale
) -> None:
    """Random issues, assignments, arrivals, lost servers, failures and restarts: every prompt is trained once.

    Late tickets are with both servers: either may answer first, fail, or be lost, and the other answers or not.
    """
    rng = random.Random(seed)
    shape = {"prompts_per_step": per_step, "bound": max_staleness, "total_groups": steps * per_step}
    ledger = TicketLedger(throwaway_journal(), **shape, on_stale=on_stale, deadline=AtOnce())
    trained: list[int] = []
    failures: dict[int, int] = {}
    holds: dict[str, set[int]] = {"a": set(), "b": set()}
    """What each server works on, answered by the other or not."""
    duplicates = 0

    def sampled_at(item: PreparedTicket) -> list[int]:
        return sorted(rng.choices(range(item.ticket.min_version, ledger.version + 1), k=3))

    def consume() -> None:
        for group in step(ledger):
            sampled = group.group.versions[group.group.is_sampled]
            assert ledger.version - 1 - int(sampled.min()) <= max_staleness
            trained.append(group.slot.position)

    for _ in range(2000):
        if ledger.version == steps:
            break
        choice = rng.choice(EVENTS)
        waiting, server = ledger.out.waiting(), rng.choice("ab")
        held = sorted(holds[server])
        if choice == "issue":
            issue(ledger, ledger.version)
        elif choice == "assign" and waiting:
            chosen = ids(rng.sample(waiting, rng.randint(1, len(waiting))))
            ledger.out.assign(chosen, server)
            holds[server].update(chosen)
        elif choice == "again":
            late = [i for i in ids(ledger.out.overdue()) if ledger.out.may_try(i, server, "ab")]
            ledger.out.assign(late, server)
            holds[server].update(late)
        elif choice == "receive" and waiting:  # from a server that was lost meanwhile
            item = rng.choice(waiting)
            arrive(ledger, item, *sampled_at(item))
        elif choice == "answer" and held:
            ticket_id = rng.choice(held)
            holds[server].remove(ticket_id)
            item = ledger.out.get(ticket_id)
            if item is not None:
                arrive(ledger, item, *sampled_at(item), server_id=server)
            else:
                duplicates += 1
                ledger.out.take_duplicate(ticket_id, server)
        elif choice == "lose":
            ledger.out.reconcile(server)
            holds[server].clear()
        elif choice == "reconnect":
            holds[server] = {*rng.sample(held, len(held) // 2), *ids(waiting[:1])}
            ledger.out.reconcile(server, holds[server])
        elif choice == "fail" and held:
            ticket_id = rng.choice(held)
            failures[ticket_id] = failures.get(ticket_id, 0) + 1
            if failures[ticket_id] < MAX_ATTEMPTS:
                holds[server].remove(ticket_id)
                assert ledger.out.give_back(ticket_id, server, "scripted", "ab")
        elif choice == "restart" and rng.random() < 0.2:
            version = ledger.version
            counts, bias = ledger.counts(), ledger.length_bias()
            ledger = TicketLedger(ledger.journal, **shape, on_stale=on_stale, deadline=AtOnce())
            holds, duplicates = {"a": set(), "b": set()}, 0
            ledger.recover(prepared, withhold_s=0.0)
            ledger.advance(version)
            assert ledger.last_step == version
            nobody_has = replace(counts, waiting=counts.waiting + counts.in_flight, in_flight=0)
            assert ledger.counts() == nobody_has
            assert ledger.length_bias() == bias
            failures = {}
        elif choice == "step" and ledger.ready():
            consume()
        assert {name: ledger.out.held_by(name) for name in holds} == {name: len(them) for name, them in holds.items()}
        assert ledger.out.duplicates == duplicates
        counts = ledger.counts()
        assert counts.residual == 0
        assert min(counts.waiting, counts.in_flight, counts.buffered) >= 0
        assert counts.issued - counts.dropped["stale"] <= (max_staleness + ledger.version + 1) * per_step
        if on_stale == "wait":
            assert counts.dropped == {"stale": 0}
    while ledger.version < steps:  # whatever the dice left undone
        ledger.out.reconcile("a")
        ledger.out.reconcile("b")
        issue(ledger, ledger.version)
        for item in ledger.out.waiting():
            arrive(ledger, item, ledger.version)
        if ledger.ready():
            consume()
    assert sorted(trained) == list(range(steps * per_step))


# --- prompts of the next step -----------------------------------------------------------------------


class CountingProcessor:
    """Encodes nothing, and keeps the rows that it is asked for; every prompt has so many bytes of pixels."""

    def __init__(self, nbytes: int):
        self.rows: list[str] = []
        self._nbytes = nbytes

    def encode(self, prompt: Any, blobs: Any) -> SimpleNamespace:
        assert set(prompt.image_hashes) <= set(blobs)
        self.rows.append(prompt.row_id)
        return SimpleNamespace(nbytes=self._nbytes)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_prompts_of_the_next_step_are_encoded_as_their_groups_arrive_and_none_after_it() -> None:
    ledger = make_ledger(per_step=2, bound=2, total=6)
    items = issue(ledger, 0)
    processor: Any = CountingProcessor(nbytes=8)
    with closing(PromptsAhead(ledger, processor)):
        for item in items[:3]:
            arrive(ledger, item)
        first = [item.ticket.prompt.row_id for item in items]
        eventually(lambda: sorted(processor.rows) == sorted(first[:2]))
        ledger.take()
        ledger.advance(1)
        eventually(lambda: first[2] in processor.rows)
    assert len(processor.rows) == 3


def test_no_more_prompts_are_encoded_ahead_than_the_cache_keeps() -> None:
    ledger = make_ledger(per_step=3, bound=0, total=3)
    processor: Any = CountingProcessor(nbytes=MOST_BYTES)
    with closing(PromptsAhead(ledger, processor)):
        for item in issue(ledger, 0):
            arrive(ledger, item)
        eventually(lambda: len(processor.rows) == 1)
        time.sleep(0.05)
    assert len(processor.rows) == 1


def test_a_returned_ticket_waits_with_what_was_sampled_of_it() -> None:
    ledger = make_ledger(2, 1, 100)
    first, other = issue(ledger, 0)[:2]
    out, partial = ledger.out, content.PARTIAL  # its newest token is of version 3
    out.assign(ids([first, other]), "s")
    assert not out.take_return(first.ticket.ticket_id, "another", partial), "it does not hold the ticket"
    assert out.take_return(first.ticket.ticket_id, "s", partial)
    going_on = out.waiting()[0]
    assert (going_on.ticket.partial, going_on.ticket.begins_at, going_on.slot) == (partial, 3, first.slot)
    assert (out.returned, out.returned_tokens, ledger.counts().residual) == (1, 2, 0)
    assert out.may_try(first.ticket.ticket_id, "s", ["s"]), "that was no failure"
    out.assign(ids([first]), "t")
    out.give_back(first.ticket.ticket_id, "t", "what was begun may be at fault", ["s", "t"])
    assert out.waiting()[0].ticket == first.ticket, "after a failure it begins anew"
    late = prepared(TicketSlot(90, 0, version=4, bound=1))
    ledger.out.add(late)
    out.assign([90], "s")
    with pytest.raises(ValueError, match="version 2, before min_version 4"):
        out.take_return(90, "s", partial)


def test_on_policy_a_returned_ticket_begins_anew() -> None:
    ledger = make_ledger(1, 0, 100)
    (item,) = issue(ledger, 0)
    ledger.out.assign(ids([item]), "s")
    assert ledger.out.take_return(item.ticket.ticket_id, "s", content.PARTIAL)
    assert ledger.out.waiting() == [item]
