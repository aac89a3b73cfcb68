"""Advantage estimators against the published values and the house rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.algorithms.loading import load_method
from asyncrl.config.installed_methods import methods
from asyncrl.config.method import Kind
from asyncrl.errors import BadStateError
from tests.rigs.estimates import LENGTHS, SCORES, VECTORS, close, estimate, kept, trajectories
from tests.rigs.provenance import provenance_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "settings", "vector", "key"),
    [
        ("grpo", {}, "grpo", "adv"),
        ("grpo", {"norm_adv_by_std": False}, "dr_grpo", "adv"),
        ("dr_grpo", {}, "dr_grpo", "adv"),
        ("rloo", {}, "rloo", "adv"),
    ],
)
def test_published_advantages_of_rows(name: str, settings: dict[str, Any], vector: str, key: str) -> None:
    group = [ord(uid) for uid in SCORES["uid"]]
    for order in ([0, 1, 2, 3, 4, 5], [4, 0, 5, 2, 1, 3]):
        t = trajectories(*([column[i] for i in order] for column in (SCORES["s"], group, LENGTHS)))
        expected = torch.tensor(VECTORS[vector][key])[order]
        close(estimate(name, t, **settings).advantages, expected[t.row], 2e-6)


def test_published_gdpo() -> None:
    given = VECTORS["gdpo"]
    parts = {"a": torch.tensor(given["reward_a"]), "b": torch.tensor(given["reward_b"])}
    t = trajectories((parts["a"] + parts["b"]).tolist(), [0] * 4, components=parts)
    close(estimate("gdpo", t).advantages, given["adv"], 2e-6)
    twice = trajectories(t.scores.tolist(), [0] * 4, components=parts, component_weights={"a": 1.0, "b": 0.0})
    advantages = estimate("gdpo", twice).advantages
    assert advantages[0] == advantages[2] > 0 > advantages[1] == advantages[3], "a alone"


@pytest.mark.parametrize("vector", ["gae_plain", "gae_observation_gap"])
def test_published_gae(vector: str) -> None:
    given = VECTORS[vector]
    mask = given["mask"]
    lengths = [int(sum(line)) for line in mask]
    rewards, values = kept(given["rewards"], mask), kept(given["values"], mask)
    t = trajectories([0.0] * len(mask), [0] * len(mask), lengths, token_rewards=rewards, values=values)
    gae = {"lam": given["lam"], "critic_lam": given["lam"]}
    raw = estimate("gae", t, gae=gae | {"whiten": False})
    close(raw.advantages, kept(given["adv_raw"], mask))
    close(raw.returns, kept(given["returns"], mask))
    if "adv_whitened" in given:
        close(estimate("gae", t, gae=gae).advantages, kept(given["adv_whitened"], mask), 2e-6)


def test_gae_of_vapo_has_a_lambda_for_each_length_and_one_of_the_critic() -> None:
    given = [VECTORS[f"vapo_lambda_len{length}"] for length in (100, 1000)]
    lengths = [100, 1000]
    rewards = torch.zeros(1100)
    rewards[[99, 1099]] = 1.0
    t = trajectories([1.0, 1.0], [0, 1], lengths, token_rewards=rewards, values=torch.zeros(1100))
    credit = estimate("gae", t, gae={"length_alpha": given[0]["alpha"], "whiten": False})
    close(credit.advantages[[0, 100]], [given[0]["lam"] ** 99, given[1]["lam"] ** 999], 1e-4)
    close(credit.returns, torch.ones(1100))  # the critic's lambda is 1


def test_published_reinforce_plus_plus_and_remax() -> None:
    given = VECTORS["reinforcepp"]
    mask = given["mask"]
    t = trajectories([1.0, -0.5], [0, 1], [3, 2], token_rewards=kept(given["rewards"], mask))
    credit = estimate("reinforce_plus_plus", t, gamma=given["gamma"])
    close(credit.returns, kept(given["returns"], mask))
    close(credit.advantages, kept(given["adv"], mask), 2e-6)

    given = VECTORS["remax"]
    rewards = torch.cat([kept(given["rewards"], mask)])
    provenance = provenance_of(torch.tensor([0, 0, 0, 1, 1]), baseline=torch.tensor([False, False, True, True]))
    counts = {"lengths": [3, 2, 0, 0], "token_rewards": rewards, "provenance": provenance}
    t = trajectories([1.0, -0.5, *given["baseline"]], [0, 1, 0, 1], **counts)
    close(estimate("remax", t).advantages, kept(given["adv"], mask))
    nan = float("nan")
    t = trajectories([1.0, -0.5, nan, -0.2], [0, 1, 0, 1], **counts)
    assert estimate("remax", t).advantages[:3].tolist() == [0.0] * 3, "no baseline, no advantage"


def test_returns_count_tokens() -> None:
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    t = trajectories([1.0], [0], [6], token_rewards=rewards)
    close(estimate("reinforce", t, gamma=0.9).advantages, [0.9**k for k in (5, 4, 3, 2, 1, 0)])


COMPARE_GROUPS = ("grpo", "dr_grpo", "rloo", "gdpo")


@pytest.mark.parametrize("name", COMPARE_GROUPS)
def test_no_spread_is_exactly_no_advantage_and_an_unscored_row_takes_no_part(name: str) -> None:
    nan = float("nan")
    for scores in ([3.0], [0.1, 0.1, 0.1], [1e6 + 0.1] * 7, [0.7] * 11, [0.0, 0.0]):
        t = trajectories(scores, [0] * len(scores), components={"only": torch.tensor(scores)})
        assert estimate(name, t).advantages.tolist() == [0.0] * len(scores)
    scores = [1.0, nan, 0.0, 0.0, nan, 0.0, nan]
    parts = {"only": torch.tensor(scores)}
    lengths = [1, 0, 1, 1, 0, 1, 0]  # what has no score trains nothing
    among = estimate(name, trajectories(scores, [0, 0, 0, 0, 1, 1, 2], lengths, components=parts)).advantages
    parts = {"only": torch.tensor([1.0, 0.0, 0.0, 0.0])}
    alone = estimate(name, trajectories([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 1], components=parts)).advantages
    assert among.tolist() == alone.tolist()
    assert among[3] == 0
    assert among[0] > 0


@pytest.mark.parametrize("name", methods("advantage"))
def test_rows_in_another_order_get_the_same_advantages(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 1, 4, 2, 5, 2]
    total = sum(lengths)
    rewards, values = (torch.rand(total, generator=generator) for _ in range(2))
    t = trajectories([0.0] * 6, [0, 0, 0, 1, 1, 1], lengths)
    scores = torch.zeros(6).index_add(0, t.row, rewards)
    columns = {
        "token_rewards": rewards,
        "values": values,
        "proximal_logprobs": -torch.rand(total, generator=generator),
        "reference_logprobs": -torch.rand(total, generator=generator),
        "squared_probabilities": torch.rand(total, generator=generator),
        "turn": t.place // 2,
        "turn_rewards": torch.rand(total, generator=generator) * (t.place % 2),
        "state": t.place // 2 * torch.tensor([1, 1, 0, 1, -1, 1])[t.row],
    }
    baseline = torch.tensor([False, False, True, False, False, True])
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    where = torch.cat([(t.row == row).nonzero()[:, 0] for row in order])

    def advantages(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        made = trajectories(
            scores[rows].tolist(),
            t.group[rows].tolist(),
            [lengths[row] for row in rows],
            components={"only": scores[rows]},
            provenance=provenance_of(
                torch.arange(6).repeat_interleave(torch.tensor(lengths)[rows]), baseline=baseline[rows]
            ),
            outcomes=scores[rows] / 2,
            **{key: column[tokens] for key, column in columns.items()},
        )
        return estimate(name, made).advantages

    close(advantages(order, where), advantages(torch.arange(6), torch.arange(total))[where], 2e-6)


@pytest.mark.parametrize("name", methods("advantage"))
def test_a_batch_without_trained_tokens_has_no_credit(name: str) -> None:
    nothing = torch.zeros(0)
    t = trajectories(
        [0.0, 1.0],
        [0, 0],
        [0, 0],
        provenance=provenance_of(nothing.long(), baseline=torch.tensor([False, True])),
        **dict.fromkeys(("proximal_logprobs", "reference_logprobs", "squared_probabilities", "values"), nothing),
    )
    assert estimate(name, t).advantages.shape == (0,)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("advantage", "return seen.scoress", r"algorithm.x .*mine failed: AttributeError: .* \(mine.py:2 in mine\)"),
        ("advantage", "return 1.0", r"answered a float: expected a Credit whose advantages are of shape \(4,\)"),
        ("policy_loss", "return seen.row", "answered a Tensor: expected a PolicyLoss whose token_loss"),
        ("selection", "return seen.row[9]", r"mine failed: IndexError: .* \(mine.py:2 in mine\)"),
    ],
)
def test_a_users_method_that_is_wrong_stops_the_run_by_name(tmp_path: Path, kind: Kind, body: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(seen, *more):\n    {body}\n")
    method = load_method(kind, f"{tmp_path}/mine.py:mine", "algorithm.x")
    with pytest.raises(BadStateError, match=said):
        method(SimpleNamespace(row=torch.zeros(4)), None)
