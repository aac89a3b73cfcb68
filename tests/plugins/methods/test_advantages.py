"""Advantage estimators of the plug-in against the published values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.load import dump_config, load_config
from asyncrl.demo.prepare import GRPO
from asyncrl.errors import UserError
from tests.rigs.estimates import LENGTHS, SCORES, VECTORS, close, estimate, kept, trajectories

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "settings", "vector", "key"),
    [
        ("opo", {}, "opo", "adv"),
        ("maxrl", {}, "maxrl", "adv"),
        ("lite_ppo", {}, "lite_ppo", "adv"),
        ("gpg", {"gpg": {"valid": "nonzero_score"}}, "gpg", "adv"),
        ("grpo_passk", {}, "grpo_passk_argmax", "adv"),
        ("grpo_passk", {"norm_adv_by_std": False}, "grpo_passk_argmax", "adv_nostd"),
    ],
)
def test_published_advantages_of_rows(name: str, settings: dict[str, Any], vector: str, key: str) -> None:
    group = [ord(uid) for uid in SCORES["uid"]]
    for order in ([0, 1, 2, 3, 4, 5], [4, 0, 5, 2, 1, 3]):
        t = trajectories(*([column[i] for i in order] for column in (SCORES["s"], group, LENGTHS)))
        expected = torch.tensor(VECTORS[vector][key])[order]
        close(estimate(name, t, **settings).advantages, expected[t.row], 2e-6)


def test_published_reinforce_plus_plus_baseline() -> None:
    given = VECTORS["reinforcepp_baseline"]
    t = trajectories(SCORES["s"], [ord(uid) for uid in SCORES["uid"]], LENGTHS)
    close(estimate("reinforce_plus_plus_baseline", t).advantages, kept(given["adv"], given["mask"]), 2e-6)


@pytest.mark.parametrize("vector", [name for name in VECTORS if name.startswith("passk_training")])
def test_published_passk_training(vector: str) -> None:
    positives, n, k = (int(part.strip("posNk")) for part in vector.removeprefix("passk_training_").split("_"))
    t = trajectories([1.0] * positives + [0.0] * (n - positives), [0] * n)
    advantages = estimate("passk_training", t, passk_training={"k": k}).advantages
    given = VECTORS[vector]
    close(advantages, [given["adv_pos"]] * positives + [given["adv_neg"]] * (n - positives))


def test_published_optimal_token_baseline() -> None:
    given = VECTORS["otb"]
    flat = {key: torch.tensor(given[key]).flatten() for key in ("rewards", "probs", "sum_pi_sq", "adv")}
    t = trajectories(
        [1.0, 0.0],
        [0, 0],
        [2, 2],
        token_rewards=flat["rewards"],
        proximal_logprobs=flat["probs"].log(),
        squared_probabilities=flat["sum_pi_sq"],
    )
    t = replace(t, behaviour_logprobs=flat["probs"].log())
    close(estimate("optimal_token_baseline", t).advantages, flat["adv"], 1e-5)
    # Tokens of the first row were half as likely, and count by their squared weight, cut at the cap.
    stale = replace(t, behaviour_logprobs=t.behaviour_logprobs - torch.tensor([2.0, 2.0, 1.0, 1.0]).log())
    for correction, squared in (({"kind": "token_tis"}, 4.0), ({"kind": "token_tis", "upper": 1.5}, 2.25)):
        energy = squared * torch.tensor(given["W"][0])
        baseline = energy / (energy + torch.tensor(given["W"][1]))
        found = estimate("optimal_token_baseline", stale, correction=correction).advantages
        close(found, torch.cat([1 - baseline, -baseline]), 1e-5)
    close(estimate("optimal_token_baseline", stale, correction={"kind": "none"}).advantages, flat["adv"], 1e-5)


@pytest.mark.parametrize(
    ("lengths", "scores", "tail"),
    [
        ([2, 3], [0.0, 1.0], {4: 1.0}),
        ([4, 1, 2], [-0.5, 1.0, 0.0], {2: -0.5, 3: -0.5}),
        ([1, 1, 1, 3], [1.0, 1.0, 1.0, 1.0], {4: 1.0, 5: 1.0}),
        ([3, 3, 0], [1.0, 0.0, float("nan")], {}),
    ],
)
def test_the_end_of_a_groups_longest_row_has_its_return(
    lengths: list[int], scores: list[float], tail: dict[int, float]
) -> None:
    """Its end of turn is trained, as in verl: where no other row has a place the baseline is 0."""
    tokens = sum(lengths)
    t = trajectories(scores, [0] * len(scores), lengths)
    t = replace(t, proximal_logprobs=torch.full((tokens,), 0.5).log(), squared_probabilities=torch.full((tokens,), 0.4))
    advantages = estimate("optimal_token_baseline", t).advantages
    assert {place: float(advantages[place]) for place in tail} == tail
    others = [place for place in range(tokens) if place not in tail]
    shared = torch.tensor([t.place[i] for i in others])
    for place in shared.unique():  # equal weights: s - mean of those that have the place
        same = torch.tensor(others)[shared == place]
        of_rows = torch.tensor(scores)[t.row[same]]
        close(advantages[same], of_rows - of_rows.mean(), 1e-5)


@pytest.mark.parametrize("others", [[], [0], [0, 0]])
def test_a_row_that_learns_alone_has_no_advantage_by_token(others: list[int]) -> None:
    """A group of one, or one whose other rows have no score and train nothing."""
    scores = [1.0] + [float("nan")] * len(others)
    t = trajectories(scores, [0] * len(scores), [3, *others])
    t = replace(t, proximal_logprobs=torch.full((3,), 0.5).log(), squared_probabilities=torch.full((3,), 0.4))
    assert estimate("optimal_token_baseline", t).advantages.tolist() == [0.0] * 3


def test_gpg_scales_by_the_groups_that_have_a_gradient() -> None:
    """B / (B - M) of the paper, in rows: all right and all wrong groups have none, whatever their rows earned."""
    scores = [1.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0]
    t = trajectories(scores, [0, 0, 1, 1, 2, 2, 3, 3])
    close(estimate("gpg", t).advantages, [2.0, -2.0, 0, 0, 0, 0, 0, 0])
    close(estimate("gpg", t, gpg={"valid": "nonzero_score"}).advantages, [0.8, -0.8, 0, 0, 0, 0, 0, 0])


def test_returns_of_turns() -> None:
    given = VECTORS["discounted_step_returns"]
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    turn = torch.tensor([0, 0, 1, 1, 2, 2])
    t = trajectories([1.0], [0], [6], token_rewards=rewards, turn=turn)
    of_turns = torch.tensor(given["returns"]).repeat_interleave(2)
    close(estimate("agentic_reinforce", t, gamma=given["gamma"]).advantages, of_turns)
    normalised = estimate("step_reinforce", t, gamma=0.9).advantages
    returns = torch.tensor(given["returns"])
    close(normalised, ((returns - returns.mean()) / (returns.std() + 1e-6)).repeat_interleave(2), 1e-5)


COMPARE_GROUPS = ("opo", "gpg", "lite_ppo", "maxrl", "grpo_passk", "passk_training")


@pytest.mark.parametrize("name", COMPARE_GROUPS)
def test_no_spread_is_exactly_no_advantage_and_an_unscored_row_takes_no_part(name: str) -> None:
    nan = float("nan")
    for scores in ([3.0], [0.1, 0.1, 0.1], [1e6 + 0.1] * 7, [0.7] * 11, [0.0, 0.0]):
        assert estimate(name, trajectories(scores, [0] * len(scores))).advantages.tolist() == [0.0] * len(scores)
    lengths = [1, 0, 1, 1, 0, 1, 0]  # what has no score trains nothing
    own = {"passk_training": {"k": 1}} if name == "passk_training" else {}
    rows = trajectories([1.0, nan, 0.0, 0.0, nan, 0.0, nan], [0, 0, 0, 0, 1, 1, 2], lengths)
    among = estimate(name, rows, **own).advantages
    alone = estimate(name, trajectories([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 1]), **own).advantages
    assert among.tolist() == alone.tolist()
    assert among[3] == 0
    assert among[0] > 0 or name == "passk_training"


def test_passk_training_needs_k_completions() -> None:
    with pytest.raises(UserError, match="passk_training needs at least 4"):
        load_config(GRPO, ["passk_training", "batch.group_size=3"])


def test_an_estimator_may_name_the_loss(tmp_path: Path) -> None:
    """Its default goes where another estimator is chosen, in a run's own file, too."""
    whole = tmp_path / "whole.yaml"
    whole.write_text(dump_config(load_config(GRPO, ["algorithm.adv_estimator=gpg"])))
    assert load_config(whole).algorithm.policy_loss == "gpg"
    assert load_config(whole, ["algorithm.adv_estimator=grpo"]).algorithm == load_config(GRPO).algorithm
