"""Filters and prompt sources in the ledger: what is filtered gives its place to the next prompt, and all add up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.filters import SampledGroup, zero_variance
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import methods
from asyncrl.config.schema import RunConfig
from asyncrl.data.prompt_sources import DataOrder, PromptSource
from asyncrl.errors import BadStateError
from asyncrl.journal.writer import Journal
from asyncrl.plugins import implementation
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.group_judge import FRUITLESS_STEPS, GroupJudge, make_judge, sampled_group
from learner.tickets.ledger import TicketLedger
from learner.tickets.replay_buffer import ReplayBuffer, make_replay_buffer
from protocol.messages import TrajectoryRecord, TrajectoryRequest
from tests.conftest import small_config
from tests.rigs.fuzz import content
from tests.rigs.journal_groups import throwaway_journal
from tests.unit.learner.test_tickets import ids, issue, prepared, step

ZERO_VARIANCE: dict[str, Any] = {"filters": ["zero_variance"]}
DYNAMIC = AlgorithmConfig(filters=("zero_variance",))
GROUP_SIZE = 4


def records(scores: Sequence[float | None]) -> tuple[TrajectoryRecord, ...]:
    (like,) = content.group(0, 0, "s", [1]).trajectories
    return tuple(
        like.model_copy(update={"reward": score, "rewards": {} if score is None else {"right": score}})
        for score in scores
    )


def received(item: PreparedTicket, scores: Sequence[float | None], version: int | None = None) -> ReceivedGroup:
    """A group of one-token trajectories with these scores."""
    group = content.group(item.slot.position, 0, "s", [1] * len(scores))
    versions = np.full(len(scores), item.slot.version if version is None else version, np.int32)
    update = {"ticket_id": item.slot.ticket_id, "trajectories": records(scores), "versions": versions}
    return ReceivedGroup(item, group.model_copy(update=update))


def scores_at(position: int, num_rows: int) -> list[float]:
    """Of a data set of which a third is impossible, a third trivial, and a third fails now and then."""
    row = position % num_rows
    if row % 3 != 2:
        return [float(row % 3)] * GROUP_SIZE
    return [float(one) for one in np.random.default_rng(position).integers(0, 2, GROUP_SIZE)]


def config_of(**sections: dict[str, Any]) -> RunConfig:
    return small_config(Path("model"), Path("data"), Path("run"), **sections)


def has_spread(group: ReceivedGroup) -> bool:
    return len({record.reward for record in group.group.trajectories}) > 1


# --- the built-in filter ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "bounds", "reason"),
    [
        ([0.0, 1.0], {}, None),
        ([0.0, 0.0, 0.0], {}, "zero_variance"),
        ([0.1 + 0.2, 0.3, 0.3], {}, "zero_variance"),  # equal but for the last bit
        ([1.0, None, None], {}, "unscored"),
        ([0.0, 1.0, 1.0, 1.0], {"low": 0.1, "high": 0.75}, "too_easy"),
        ([0.0, 0.0, 0.0, 1.0], {"low": 0.25}, "too_hard"),
        ([0.0, 0.0, 1.0, 1.0], {"low": 0.25, "high": 0.75}, None),
    ],
)
def test_zero_variance(scores: list[float | None], bounds: dict[str, Any], reason: str | None) -> None:
    group = SampledGroup(content.ticket(0, 0).prompt, records(scores), [1] * len(scores))
    for component in ("", "right"):
        config = AlgorithmConfig.model_validate(ZERO_VARIANCE | {"zero_variance": bounds | {"component": component}})
        assert zero_variance(group, config) == reason


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for algorithm, said in (
        (ZERO_VARIANCE | {"zero_variance": {"low": 0.5, "high": 0.5}}, r"zero_variance.low \(0.5\) must be below"),
        (
            ZERO_VARIANCE | {"zero_variance": {"component": "right"}},
            "zero_variance.component is 'right', but the components .* are short",
        ),
        ({"filters": ["zero_varianc"]}, "has 'zero_varianc', which is unknown.* Did you mean"),
    ):
        with pytest.raises(ValueError, match=said):
            config_of(algorithm=algorithm)


def test_a_filter_may_look_at_accuracy_whatever_its_name() -> None:
    """Where all are wrong, penalties of other lengths are no spread."""
    config = config_of(algorithm=ZERO_VARIANCE | {"zero_variance": {"component": "accuracy"}})
    judge = judge_of(config, DataOrder(1, seed=0, shuffle=False))
    assert judge._accuracy == config.reward.accuracy_component != "accuracy"
    scores = [{"right": 0.0, "short": short} for short in (0.1, 0.2)]
    made = [
        record.model_copy(update={"rewards": each}) for record, each in zip(records([0.1, 0.2]), scores, strict=True)
    ]
    group = SampledGroup(content.ticket(0, 0).prompt, made, [1, 1], accuracy="right")
    assert zero_variance(group, config.algorithm) == "zero_variance"


# --- groups without a score ----------------------------------------------------------------------------------


def test_groups_without_any_score_stop_the_run_with_what_the_reward_says() -> None:
    """Of 2 prompts per step, and at least 64 trajectories: after 16 groups of 4 in a row."""
    (item,) = issue(make_ledger(1, 0), 0)

    def group(score: float | None, kind: str = "reward_exception") -> ReceivedGroup:
        made = received(item, [None, None, None, score])
        told = {"error_kind": kind, "error_message": "the judge is away"}
        records = tuple(record.model_copy(update=told) for record in made.group.trajectories)
        return replace(made, group=made.group.model_copy(update={"trajectories": records}))

    judge = GroupJudge(PromptSource(), prompts_per_step=2, total_groups=1000)
    for score in (*[None] * 15, 0.0, *[None] * 15):
        judge.judge([group(score)])
    with pytest.raises(BadStateError, match=r"16 groups in a row has a score.* reward_exception: the judge is away"):
        judge.judge([group(None)])
    short_run = GroupJudge(PromptSource(), prompts_per_step=1, total_groups=2)
    short_run.judge([group(None)])
    with pytest.raises(BadStateError, match="2 groups in a row"):
        short_run.judge([group(None)])
    of_environment = GroupJudge(PromptSource(), prompts_per_step=2, total_groups=20)
    for _ in range(19):  # counted by EnvironmentHealth
        of_environment.judge([group(None, "environment_observation")])
    with pytest.raises(BadStateError, match=r"20 groups in .* environment_observation: .*asyncrl env try"):
        of_environment.judge([group(None, "environment_observation")])


# --- a filter of the user ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", r"on the group of row fuzz:0, failed: ZeroDivisionError: .* \(mine.py:2 in mine\)"),
        ("return True", "answered True: expected None"),
        ("return 'stale'", "answered 'stale'"),
        ("return 'Too hard!'", "answered 'Too hard!'"),
    ],
)
def test_a_filter_that_fails_stops_the_run_by_name(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(group, config):\n    {body}\n")
    ledger = make_ledger(1, 1, filters=AlgorithmConfig(filters=(f"{tmp_path / 'mine.py'}:mine",)))
    (item, *_) = issue(ledger, 0)
    with pytest.raises(BadStateError, match=said):
        ledger.receive([received(item, [0, 1])])
    assert ledger.counts().residual == 0
    assert ledger.journal.state().buffered == (), "nothing is kept of a group that was not judged"


def test_a_filter_sees_prompt_scores_and_lengths_and_names_its_reason(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def mine(group, config):\n"
        "    assert group.prompt.columns['difficulty'] == 3 and group.lengths == [1, 1]\n"
        "    return 'boring' if group.scores().max() < 1 else None\n"
    )
    ledger = make_ledger(1, 1, filters=AlgorithmConfig(filters=(f"{tmp_path / 'mine.py'}:mine",)))
    dull, fine = issue(ledger, 0)
    ledger.receive([received(dull, [0, 0.5]), received(fine, [0, 1])])
    assert ledger.counts().dropped == {"stale": 0, "boring": 1}
    assert ledger.journal.filtered() == {0: "boring"}
    assert [item.slot.ticket_id for item in step(ledger)] == [1]


# --- the ledger ----------------------------------------------------------------------------------------------


def make_ledger(
    per_step: int,
    bound: int,
    *,
    steps: int = 10,
    end: int | None = None,
    num_rows: int = 0,
    filters: AlgorithmConfig = DYNAMIC,
    source: PromptSource | None = None,
    journal: Journal | None = None,
    **more: Any,
) -> TicketLedger:
    judge = GroupJudge(source or PromptSource(end), filters, num_rows=num_rows, prompts_per_step=per_step)
    shape = {"prompts_per_step": per_step, "bound": bound, "total_groups": steps * per_step}
    return TicketLedger(journal or throwaway_journal(), **shape, judge=judge, **more)


def test_the_next_position_takes_the_place_of_a_filtered_one_and_its_own_is_not_issued_again() -> None:
    ledger = make_ledger(2, 1, end=100)
    first = issue(ledger, 0)
    ledger.receive([received(first[0], [0, 0]), received(first[1], [0, 1]), received(first[2], [1, 1])])
    counts = ledger.counts()
    assert (counts.waiting, counts.buffered, counts.dropped, counts.residual) == (
        1,
        1,
        {"stale": 0, "zero_variance": 2},
        0,
    )
    again = issue(ledger, 0)
    assert [(item.slot.ticket_id, item.slot.position) for item in again] == [(4, 4), (5, 5)]
    assert not ledger.admissible(0), "as many as before"
    assert ledger.length_bias().keys() == {"length/buffered"}, "the meter is of what staleness loses"


def test_on_policy_groups_are_judged_together_and_a_lost_servers_batch_is_the_one_that_it_began() -> None:
    ledger = make_ledger(3, 0, end=100)
    first = issue(ledger, 0)
    ledger.receive([received(first[1], [0, 0])])
    assert ledger.counts().buffered == 1, "not judged before its mates are here: they may be sampled again with it"
    assert not ledger.admissible(0)
    assert ids(ledger.batch_mates([first[0], first[2]])) == [1]
    again = make_ledger(3, 0, end=100, journal=ledger.journal)
    again.recover(prepared, withhold_s=0.0)
    for ledger in (again,):
        ledger.receive([received(first[0], [0, 1])])
        ledger.receive([received(first[2], [1, 1])])
        assert ledger.counts().dropped["zero_variance"] == 2
    second = issue(again, 0)
    assert [item.slot.position for item in second] == [3, 4]
    assert again.batch_mates(second) == [], "ticket 0 was sampled in the batch before"
    again.receive([received(second[0], [0, 1])])
    assert ids(again.batch_mates([second[1]])) == [3]
    third = make_ledger(3, 0, end=100, journal=again.journal)
    third.recover(prepared, withhold_s=0.0)
    third.receive([received(second[1], [1, 0])])
    assert third.counts().dropped["zero_variance"] == 2, "what was judged is not judged again"
    assert third.ready()


def test_the_last_step_takes_what_is_left_when_the_data_is_used_up() -> None:
    ledger = make_ledger(2, 1, end=5, steps=3)
    items = issue(ledger, 0)
    ledger.receive([received(item, [0, 1]) for item in items[:3]])
    ledger.receive([received(items[3], [0, 0])])
    assert len(step(ledger)) == 2
    (last,) = issue(ledger, 1)
    assert not ledger.ready(), "position 4 may still teach something"
    ledger.receive([received(last, [1, 1])])
    assert ledger.ready()
    assert not ledger.is_over
    assert [item.slot.position for item in step(ledger)] == [2]
    assert ledger.is_over
    counts = ledger.counts()
    assert (counts.issued, counts.trained, counts.residual) == (5, 3, 0)
    assert counts.describe_dropped() == "zero_variance 2"
    longer = make_ledger(2, 1, end=8, steps=4, journal=ledger.journal)
    longer.recover(prepared, withhold_s=0.0)
    longer.advance(1)
    assert len(longer.take_again(2, prepared)) == 1
    longer.advance(2)
    assert not longer.is_over
    assert len(issue(longer, 2)) == 3, "the short step's empty place stays empty: nothing becomes due too early"


def test_with_a_number_of_steps_the_data_goes_round_and_the_steps_are_whole() -> None:
    ledger = make_ledger(2, 1, steps=3, num_rows=4)
    trained: list[int] = []
    while ledger.version < 3:
        issue(ledger, ledger.version)
        for item in ledger.out.waiting():
            ledger.receive([received(item, [0, item.slot.position % 4])])  # row 0 never teaches anything
        if ledger.ready():
            trained += [item.slot.position for item in step(ledger)]
    assert trained == [1, 2, 3, 5, 6, 7]
    counts = ledger.counts()
    assert (counts.issued, counts.dropped["zero_variance"], counts.waiting, counts.buffered) == (8, 2, 0, 0)


def test_data_that_teaches_nothing_stops_the_run() -> None:
    ledger = make_ledger(1, 1, num_rows=4)

    def go_on() -> None:
        for item in issue(ledger, 0):
            ledger.receive([received(item, [0, 0])])

    for _ in range(FRUITLESS_STEPS // 2):
        go_on()
    with pytest.raises(BadStateError, match=f"dropped {FRUITLESS_STEPS + 1} groups in a row and left none"):
        go_on()


def test_a_greedy_baseline_is_no_spread() -> None:
    ledger = make_ledger(1, 1)
    (slot, *_) = ledger.admissible(0)
    item = prepared(slot)
    requests = (TrajectoryRequest(greedy=True), TrajectoryRequest())
    item = replace(item, ticket=item.ticket.model_copy(update={"requests": requests}))
    item = received(item, [1, 0])
    roles = tuple(r.model_copy(update={"role": item.ticket.role(i)}) for i, r in enumerate(item.group.trajectories))
    group = sampled_group(replace(item, group=item.group.model_copy(update={"trajectories": roles})))
    assert group.scores().tolist() == [0]
    assert group.lengths == [1]


SOURCES = ("all", *methods("prompt_source"))


def source_of(kind: str, num_rows: int, seed: int, end: int | None) -> PromptSource:
    if kind == "all":
        return PromptSource(end)
    method, order = methods("prompt_source")[kind], DataOrder(num_rows, seed, shuffle=False)
    assert method.settings is not None
    create = implementation(method.implementation)
    return create(method.settings(), order, seed, accuracy="right", per_step=2, end=end)


def buffer_of(size: int, seed: int) -> ReplayBuffer:
    """The installed replay buffer, where it is to have a size."""
    names = methods("replay_buffer") if size else {}
    return make_replay_buffer(AlgorithmConfig.model_validate({name: {"size": size} for name in names}), seed)


def contents(ledger: TicketLedger) -> set[int]:
    """Tickets of the groups that a step may draw."""
    return {item.slot.ticket_id for item in ledger._replay.draw(0, 10**6)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 4),
    bound=st.integers(0, 3),
    num_rows=st.integers(1, 12),
    epochs=st.integers(1, 4),
    kind=st.sampled_from(SOURCES),
    on_stale=st.sampled_from(["wait", "drop", "mask"]),
    replay_size=st.sampled_from([0, 1, 64] if methods("replay_buffer") else [0]),
)
def test_every_position_is_trained_filtered_or_passed_over_once(
    seed: int, per_step: int, bound: int, num_rows: int, epochs: int, kind: str, on_stale: Any, replay_size: int
) -> None:
    """Random arrivals, kills and steps: the account adds up at every instant, and the epochs end. What is replayed was
    trained before, is within the bound, and is replayed again by a learner that makes its last step again."""
    rng = random.Random(seed)
    steps = -(-num_rows * epochs // per_step)
    end = steps * per_step
    journal = throwaway_journal()

    def new_ledger() -> TicketLedger:
        source = source_of(kind, num_rows, seed, end)
        shape = {"steps": steps, "source": source, "num_rows": 10**6, "on_stale": on_stale}
        return make_ledger(per_step, bound, journal=journal, replay=buffer_of(replay_size, seed), **shape)

    ledger = new_ledger()
    trained: list[int] = []
    taken: list[ReceivedGroup] = []
    for _ in range(5000):
        waiting = ledger.out.waiting()
        choice = rng.choice(("issue", "receive", "receive", "receive", "step", "kill"))
        if choice == "issue":
            issue(ledger, ledger.version)
        elif choice == "receive" and waiting:
            chosen = rng.sample(waiting, rng.randint(1, min(3, len(waiting))))
            versions = [rng.randint(item.slot.version, ledger.version) for item in chosen]
            groups = [
                received(item, scores_at(item.slot.position, num_rows), version)
                for item, version in zip(chosen, versions, strict=True)
            ]
            ledger.receive(groups)
        elif choice == "step" and ledger.ready():
            taken = step(ledger)
            assert all(map(has_spread, taken))
            assert len(taken) == per_step or ledger.is_over
            replayed = [item for item in taken if item.is_replayed]
            assert {item.slot.position for item in replayed} <= {*trained}
            assert all(item.oldest_version >= ledger.version - 1 - bound for item in replayed)
            assert len(replayed) < min(per_step, replay_size + 1)
            trained += [item.slot.position for item in taken if not item.is_replayed]
        elif choice == "kill" and rng.random() < 0.2:
            before, version, known = ledger.counts(), ledger.version, ledger._judge.source.state()
            buffered, replayable = {*ledger._buffer}, contents(ledger)
            places = {name: number for name, number in ledger._counters.items() if number}
            journal.forget_payloads(max(version - 1 - bound * bool(replay_size), 0))  # a checkpoint of the step before
            ledger = new_ledger()
            ledger.recover(prepared, withhold_s=0.0)
            if taken:
                ledger.advance(version - 1)
                again = ledger.take_again(version, prepared)
                assert [(item.slot, item.is_replayed) for item in again] == [(i.slot, i.is_replayed) for i in taken]
                sources = [np.concatenate([item.group.source for item in batch]) for batch in (again, taken)]
                assert np.array_equal(*sources)
            ledger.advance(version)
            assert ledger.counts() == before
            assert {name: number for name, number in ledger._counters.items() if number} == places
            assert ledger._judge.source.state() == known
            assert {*ledger._buffer} == buffered
            assert contents(ledger) == replayable
        counts = ledger.counts()
        assert counts.residual == 0
        live = counts.issued - sum(counts.dropped.values())
        without_ticket = ledger._counters["replayed"] + ledger._counters["reserved"]
        assert live + without_ticket <= (bound + ledger.version + 1) * per_step
        if ledger.is_over:
            break
    assert ledger.is_over, "the epochs end"
    filtered, skipped = ledger.journal.filtered(), ledger._counters["skipped"]
    assert len(set(trained)) == len(trained)
    assert not filtered.keys() & set(trained)
    passed_last = end - ledger._counters["next_position"]
    assert len(trained) + len(filtered) + skipped + passed_last == end
    if kind == "all":
        assert sorted([*trained, *filtered]) == list(range(end))


@pytest.mark.parametrize("kind", SOURCES)
def test_on_policy_the_order_of_arrival_decides_nothing(kind: str) -> None:
    def batches(arrival: int) -> list[list[tuple[int, int]]]:
        rng, steps = random.Random(arrival), 12
        ledger = make_ledger(2, 0, steps=steps, source=source_of(kind, 6, 5, None), num_rows=10**6)
        found: list[list[tuple[int, int]]] = []
        while ledger.version < steps:
            issue(ledger, ledger.version)
            waiting = ledger.out.waiting()
            for item in rng.sample(waiting, len(waiting)):
                ledger.receive([received(item, scores_at(item.slot.position, 6))])
            if ledger.ready():
                found.append([(item.slot.ticket_id, item.slot.position) for item in step(ledger)])
        return found

    assert batches(1) == batches(2) == batches(3)


def judge_of(config: RunConfig, order: DataOrder) -> GroupJudge:
    return make_judge(
        config.algorithm,
        order,
        prompts_per_step=config.batch.prompts_per_step,
        total_steps=config.total_steps(order.num_rows),
        has_end=not config.trainer.max_steps,
        seed=config.trainer.seed,
        accuracy=config.reward.accuracy_component,
    )


# --- prompt sources --------------------------------------------------------------------------------------------


def test_the_judge_of_a_configuration() -> None:
    order = DataOrder(10, 1)
    for kind in SOURCES:
        chosen = {} if kind == "all" else {kind: {}}
        judge = judge_of(config_of(algorithm=chosen, trainer={"max_steps": 0, "total_epochs": 3}), order)
        expected = "asyncrl.data.prompt_sources:PromptSource"
        if kind != "all":
            expected = methods("prompt_source")[kind].implementation
        assert type(judge.source) is implementation(expected)
        assert judge.is_idle == (kind == "all")
        assert judge.source.next(100, 0) == list(range(32)), "three epochs, in whole steps; all rows are unseen"
    assert judge_of(config_of(trainer={"max_steps": 1}), order).source.end is None
