"""Credit over turns, by hand: two rows of two turns and one of one, in a group; a fourth row is another prompt's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.algorithms.kl import penalise
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import methods

pytestmark = pytest.mark.usefixtures("one_thread")
OF_TURNS = [name for name, method in methods("advantage").items() if "turns" in method.needs]
ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
MADE = Trajectories(
    scores=torch.tensor([2.5, 1.0, 0.0, 4.0]),
    outcomes=torch.tensor([1.0, 0.5, 0.0, 3.0]),
    group=torch.tensor([0, 0, 0, 1]),
    row=ROWS,
    behaviour_logprobs=torch.zeros(8),
    turn=torch.tensor([0, 0, 1, 0, 1, 0, 0, 1]),
    turn_rewards=torch.tensor([0.0, 0.5, 1.0, 0.5, 0.0, 0.0, 1.0, 0.0]),
    state=torch.tensor([0, 0, 7, 0, 7, 0, 0, 7]),
)


def estimate(name: str, t: Trajectories = MADE, **settings: Any) -> Credit:
    return load_method("advantage", name, "adv_estimator")(t, AlgorithmConfig(adv_estimator=name, **settings))


def close(got: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32), atol=2e-6, rtol=2e-6)


def test_rewards_of_turns_are_where_they_end_and_the_outcome_is_at_the_end() -> None:
    assert MADE.rewards.tolist() == [0.0, 0.5, 2.0, 0.5, 0.5, 0.0, 1.0, 3.0]
    assert torch.zeros(4).index_add(0, MADE.row, MADE.rewards).equal(MADE.scores)
    plain = replace(MADE, outcomes=None, turn_rewards=None)
    assert plain.rewards.tolist() == [0.0, 0.0, 2.5, 0.0, 1.0, 0.0, 0.0, 4.0]
    penalty = torch.full((8,), 0.5)
    assert penalise(MADE, penalty).rewards.equal(MADE.rewards - penalty)


def test_a_return_is_compared_with_turns_of_the_same_number() -> None:
    """First turns return 0.5 + 0.5 * 2 = 1.5, 0.5 + 0.5 * 0.5 = 0.75 and 0; second ones 2 and 0.5; row 3 is alone."""
    credit = estimate("turn_return", gamma=0.5, norm_adv_by_std=False)
    close(credit.advantages, [0.75, 0.75, 0.75, 0.0, -0.75, -0.75, 0.0, 0.0])
    assert credit.returns is not None
    close(credit.returns, [1.5, 1.5, 2.0, 0.75, 0.5, 0.0, 2.5, 3.0])
    close(estimate("turn_return", gamma=0.5).advantages, [1, 1, 0.5**0.5, 0, -(0.5**0.5), -1, 0, 0])


def test_the_last_turn_of_a_groups_longest_row_is_compared_with_all_turns() -> None:
    """Row 0 has a third turn of return 4: the group's turns return 0.5 * 0.5 * 4 = 1, 2, 4, then 0 and 1."""
    t = Trajectories(
        scores=torch.tensor([4.0, 0.0, 1.0]),
        group=torch.zeros(3, dtype=torch.long),
        row=torch.tensor([0, 0, 0, 1, 2]),
        behaviour_logprobs=torch.zeros(5),
        turn=torch.tensor([0, 1, 2, 0, 0]),
    )
    plain = {"gamma": 0.5, "norm_adv_by_std": False}
    first = torch.tensor([1.0, 0.0, 1.0]) - 2 / 3
    close(estimate("turn_return", t, **plain).advantages, [first[0], 2 - 1.6, 4 - 1.6, first[1], first[2]])
    alone = replace(t, group=torch.arange(3))
    assert estimate("turn_return", alone, **plain).advantages.tolist() == [0.0] * 5


def test_gigpo_adds_what_a_turn_returns_among_those_from_its_state() -> None:
    """Scores against their mean 3.5 / 3 and, with gamma 0.5, first turns against 0.75, second ones against 1.25."""
    plain = {"gamma": 0.5, "norm_adv_by_std": False}
    of_rows = torch.tensor([2.5, 1.0, 0.0]) - 3.5 / 3
    of_turns = torch.tensor([0.75, 0.75, 0.75, 0.0, -0.75, -0.75])
    expected = torch.cat([of_rows[ROWS[:6]] + 2 * of_turns, torch.zeros(2)])
    close(estimate("gigpo", gigpo={"turn_weight": 2.0}, **plain).advantages, expected)

    elsewhere = replace(MADE, state=torch.tensor([0, 0, 7, 0, 8, 0, 0, 7]))
    unsaid = replace(MADE, state=torch.tensor([0, 0, -1, 0, -1, 0, 0, -1]))
    nothing_known = replace(MADE, state=None)
    expected[[2, 4]] = of_rows[[0, 1]]
    for alone in (elsewhere, unsaid, nothing_known):
        close(estimate("gigpo", alone, gigpo={"turn_weight": 2.0}, **plain).advantages, expected)

    same = replace(MADE, state=torch.zeros(8, dtype=torch.long))  # returns 1.5, 2, 0.75, 0.5 and 0, of mean 0.95
    returns = torch.tensor([1.5, 1.5, 2.0, 0.75, 0.5, 0.0])
    pooled = torch.cat([of_rows[ROWS[:6]] + returns - 0.95, torch.tensor([-0.25, 0.25])])
    close(estimate("gigpo", same, **plain).advantages, pooled)
    assert AlgorithmConfig(adv_estimator="gigpo").gamma == 0.95, "the paper's"
    of_grpo = estimate("grpo").advantages
    assert estimate("gigpo", gigpo={"turn_weight": 0.0}).advantages.equal(of_grpo)


def test_mt_grpo_normalises_the_outcome_and_the_turns_apart() -> None:
    """Outcomes 1, 0.5, 0; first turns earn 0.5, 0.5, 0, of mean 1/3 and variance 1/12, second ones 1 and 0."""
    outcome = torch.tensor([1.0, 0.0, -1.0])[ROWS[:6]]
    half, first = 0.5**0.5, (1 / 6) * 12**0.5
    of_turns = torch.tensor([first, first, half, first, -half, -2 * first])
    expected = torch.cat([outcome + 0.5 * of_turns, torch.zeros(2)])
    torch.testing.assert_close(
        estimate("mt_grpo", mt_grpo={"turn_weight": 0.5}).advantages, expected, atol=1e-5, rtol=1e-5
    )
    of_outcome = replace(MADE, scores=torch.tensor([1.0, 0.5, 0.0, 3.0]))
    silent = replace(MADE, turn_rewards=None)
    assert estimate("mt_grpo", silent).advantages.equal(estimate("grpo", of_outcome).advantages)


def test_gae_takes_the_rewards_of_turns_and_skips_what_is_between() -> None:
    """Row 1: delta_1 = 0.5 - 0.2, delta_0 = 0.5 + 0.5 * 0.2 - 0.4, whatever was shown between its two tokens."""
    t = replace(MADE, values=torch.tensor([0.0, 0.0, 0.0, 0.4, 0.2, 0.0, 0.0, 0.0]))
    credit = estimate("gae", t, gamma=0.5, gae={"lam": 0.8, "critic_lam": 0.8, "whiten": False})
    close(credit.advantages[3:5], [0.2 + 0.4 * 0.3, 0.3])


@pytest.mark.parametrize("name", OF_TURNS)
def test_turns_of_one_row_or_without_spread_get_exactly_nothing(name: str) -> None:
    alone = replace(MADE, group=torch.arange(4))
    if name != "gigpo":  # there a row may pass a state twice
        assert estimate(name, alone).advantages.tolist() == [0.0] * 8
    equal = replace(
        MADE,
        scores=torch.full((4,), 0.1),
        outcomes=torch.full((4,), 0.1),
        turn=torch.zeros(8, dtype=torch.long),
        turn_rewards=None,
        state=torch.zeros(8, dtype=torch.long),
    )
    assert estimate(name, equal).advantages.tolist() == [0.0] * 8


@pytest.mark.parametrize("name", OF_TURNS)
def test_states_are_numbers_without_an_order(name: str) -> None:
    renamed = replace(MADE, state=torch.tensor([0, 0, 3, 0, 3, 0, 0, 3]))
    assert estimate(name, renamed).advantages.equal(estimate(name).advantages)
