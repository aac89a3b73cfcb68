"""The replay buffer: how groups are drawn, and how the ledger fills places of filtered groups from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl_plugins.methods.replay_buffer import Ssb, spread_of
from asyncrl_plugins.methods.settings import SsbConfig
from learner.groups.ticket import ReceivedGroup
from tests.unit.learner.test_group_filters import make_ledger, received
from tests.unit.learner.test_tickets import issue, prepared, step

EVEN, ODD, SMALL, FLAT = [0, 0, 1, 1], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.7], [1, 1, 1, 1]


def group(ticket_id: int, scores: Sequence[float | None], *, version: int = 0, bound: int = 2) -> ReceivedGroup:
    return received(prepared(TicketSlot(ticket_id, ticket_id, version, bound)), scores)


def buffer_of(size: int, seed: int = 0) -> Ssb:
    return Ssb(SsbConfig(size=size), seed)


def drawn(buffer: Ssb, number: int, count: int) -> list[int]:
    return [item.slot.ticket_id for item in buffer.draw(number, count)]


@pytest.mark.parametrize(("scores", "expected"), [(EVEN, 0.5), (ODD, 0.375), (FLAT, 0), ([0, None, 1], 0.5), ([], 0)])
def test_spread_is_the_mean_absolute_advantage(scores: list[float | None], expected: float) -> None:
    assert spread_of(group(0, scores)) == expected


def test_groups_are_drawn_in_proportion_to_their_spread() -> None:
    buffer = buffer_of(64, seed=3)
    buffer.add([group(0, EVEN), group(1, ODD), group(2, SMALL), group(3, FLAT)])
    weights, draws = {0: 0.5, 1: 0.375, 2: 0.075}, 4000
    counts = Counter(i for number in range(draws) for i in drawn(buffer, number, 1))
    for ticket_id, weight in weights.items():
        assert counts[ticket_id] / draws == pytest.approx(weight / sum(weights.values()), abs=0.025)
    # The second of two is drawn from what the first one leaves: P(2 is not drawn) = P(0 then 1) + P(1 then 0).
    pairs = Counter(tuple(drawn(buffer, number, 2)) for number in range(draws))
    assert pairs[0, 1] / draws == pytest.approx(0.5 / 0.95 * 0.375 / 0.45 + 0.375 / 0.95 * 0.5 / 0.575, abs=0.025)
    assert {*pairs} == {(0, 1), (0, 2), (1, 2)}, "different ones, and none without spread"


def test_a_draw_is_a_function_of_seed_step_and_content() -> None:
    first, other, seeded = buffer_of(64), buffer_of(64), buffer_of(64, seed=1)
    groups = [group(i, EVEN if i % 2 else ODD) for i in range(20)]
    first.add(groups)
    other.add(reversed(groups))
    seeded.add(groups)
    assert [drawn(first, n, 3) for n in range(9)] == [drawn(other, n, 3) for n in range(9)]
    assert [drawn(first, n, 3) for n in range(9)] != [drawn(seeded, n, 3) for n in range(9)]


def test_at_most_size_groups_those_of_the_largest_spread_and_none_over_the_bound() -> None:
    buffer = buffer_of(2)
    buffer.add([group(0, SMALL), group(1, ODD, version=1), group(2, EVEN), group(3, SMALL, version=1)])
    assert (buffer.available, drawn(buffer, 1, 4)) == (2, [1, 2])
    buffer.forget(3)
    assert drawn(buffer, 1, 4) == [1, 3]
    buffer.forget(4)
    assert (buffer.available, drawn(buffer, 1, 4)) == (0, [])


def test_a_trained_group_takes_the_place_of_a_filtered_one_where_the_step_would_wait() -> None:
    ledger = make_ledger(2, 2, end=100, replay=buffer_of(64))
    first = issue(ledger, 0)
    assert len(first) == 6
    ledger.receive([received(first[0], FLAT)])
    assert len(issue(ledger, 0)) == 1, "the buffer is empty: another prompt takes the place"
    ledger.receive([received(first[1], EVEN), received(first[2], EVEN)])
    assert [item.is_replayed for item in step(ledger)] == [False, False]
    assert len(issue(ledger, 1)) == 2
    ledger.receive([received(first[3], FLAT)])
    assert not issue(ledger, 1), "the place is the buffer's"
    assert not ledger.ready(), "a step has a new group, too"
    ledger.receive([received(first[4], ODD)])
    assert ledger.ready()
    new, again = step(ledger)
    assert (new.slot, new.is_replayed) == (first[4].slot, False)
    assert again.slot in (first[1].slot, first[2].slot)
    assert again.is_replayed
    counts = ledger.counts()
    assert (counts.trained, counts.residual) == (3, 0), "each group counts once"
    assert ledger.journal.consumed(2) == (new.slot,)
    assert ledger.journal.replayed(2) == (again.slot,)
    assert len(issue(ledger, 2)) == 2, "as many as a step takes: what was replayed takes no ticket's place"


def test_places_are_given_back_when_the_groups_of_the_buffer_are_too_old() -> None:
    ledger = make_ledger(2, 1, end=100, replay=buffer_of(64))
    first = issue(ledger, 0)
    ledger.receive([received(item, EVEN) for item in first[:2]])
    step(ledger)
    second = issue(ledger, 1)
    ledger.receive([received(second[0], FLAT)])
    assert not issue(ledger, 1)
    ledger.receive([received(item, EVEN) for item in first[2:]])
    assert not any(item.is_replayed for item in step(ledger)), "enough new groups are there"
    assert len(issue(ledger, 2)) == 3, "all that was trained is of version 0: another prompt takes the place"


def test_a_buffer_that_would_do_nothing_is_refused(make_config: Callable[..., RunConfig]) -> None:
    for algorithm, said in (
        ({"ssb": {}}, "algorithm.ssb is chosen, and no group is dropped .*filters"),
        ({"ssb": {}, "filters": ["zero_variance"]}, "but learner.max_staleness is 0: groups of earlier"),
    ):
        with pytest.raises(ValueError, match=said):
            make_config(algorithm=algorithm)
