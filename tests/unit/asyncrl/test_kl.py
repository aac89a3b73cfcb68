"""KL estimators against the published values and, by enumeration, against the KL's own value and gradient."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from asyncrl.algorithms.kl import LARGEST_KL, mean_over_rows, penalise, reference_kl
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.trajectories import Trajectories
from asyncrl.config.algorithm import AlgorithmConfig, KlEstimator
from asyncrl.config.installed_methods import methods
from asyncrl.config.methods import EntropyControlConfig
from asyncrl.models.sampling_distribution import exact_kl
from learner.training.controllers import Coefficients, EntropyController
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
OF_SAMPLED_TOKENS = [name for name in get_args(KlEstimator) if name != "full"]
SAME_MEAN_GRADIENT = ("k2", "k1+", "k3+", "k3_unbiased")
"""Estimators whose gradient, on average over samples, is the KL's."""


@pytest.mark.parametrize("estimator", OF_SAMPLED_TOKENS)
def test_published_values(estimator: Any) -> None:
    given = VECTORS["kl"]
    logprobs, reference = torch.tensor(given["logp"]), torch.tensor(given["ref"])
    expected = given["k3_unbiased_ratio_old_eq_ref" if estimator == "k3_unbiased" else estimator.removesuffix("+")]
    found = reference_kl(estimator, logprobs, reference, behaviour_logprobs=reference)
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_straight_through_has_the_gradient_of_k2(estimator: Any) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.5, -1.8, -0.5])
    reference_kl(estimator, logprobs, reference).sum().backward()
    torch.testing.assert_close(logprobs.grad, (logprobs - reference).detach())


def test_k3_is_cut_so_that_no_token_decides_the_step() -> None:
    logprobs = torch.tensor([0.0, -40.0], requires_grad=True)
    kl = reference_kl("k3", logprobs, torch.tensor([-60.0, 0.0]))
    assert kl.tolist() == [LARGEST_KL, LARGEST_KL]
    kl.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


class Enumerated:
    """A policy, a reference and another policy that sampled, over five tokens, in fp64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.logits, reference, other = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
        self.logits.requires_grad_()
        self.reference, self.other = reference.log_softmax(0), other.log_softmax(0)

    @property
    def policy(self) -> torch.Tensor:
        return self.logits.log_softmax(0)

    def mean(self, estimator: Any, sampled_by: torch.Tensor) -> torch.Tensor:
        estimates = reference_kl(estimator, self.policy, self.reference, sampled_by)
        return (sampled_by.exp().detach() * estimates).sum()

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.logits)[0]


def test_the_exact_kl_is_the_mean_of_k1_and_k3() -> None:
    e = Enumerated()
    exact = exact_kl(e.policy[None], e.reference[None])[0]
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(e.mean(estimator, e.policy.detach()), exact)
    torch.testing.assert_close(e.mean("k3_unbiased", e.other), exact)


def test_the_exact_kl_takes_no_notice_of_banned_tokens() -> None:
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    ban = torch.tensor([0.0, 0.0, float("-inf"), 0.0, 0.0, 0.0], dtype=torch.float64)
    reference = (torch.randn(3, 6, dtype=torch.float64) + ban).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda given: exact_kl((given + ban).log_softmax(-1), reference), logits)


@pytest.mark.parametrize("estimator", OF_SAMPLED_TOKENS)
def test_which_estimators_have_the_gradient_of_the_kl_as_a_loss(estimator: Any) -> None:
    """On-policy; k3_unbiased whichever policy has sampled. That of k1 is 0, which the configuration refuses."""
    e = Enumerated()
    wanted = e.gradient(exact_kl(e.policy[None], e.reference[None])[0])
    sampled_by = e.other if estimator == "k3_unbiased" else e.policy.detach()
    found = e.gradient(e.mean(estimator, sampled_by))
    assert torch.allclose(found, wanted) == (estimator in SAME_MEAN_GRADIENT)
    assert (found.abs().max() < 1e-12) == (estimator == "k1")


def test_k1_in_the_reward_has_the_gradient_of_the_kl() -> None:
    e = Enumerated()
    kl = reference_kl("k1", e.policy.detach(), e.reference)
    found = e.gradient((e.policy.detach().exp() * kl * e.policy).sum())
    torch.testing.assert_close(found, e.gradient(exact_kl(e.policy[None], e.reference[None])[0]))


# --- KL in the reward ----------------------------------------------------------------------------------


def test_a_penalty_is_in_the_tokens_rewards_and_in_sum_in_the_score() -> None:
    t = Trajectories(
        torch.tensor([1.0, 0.0, torch.nan]), torch.zeros(3, dtype=torch.long), torch.tensor([0, 0, 1]), torch.zeros(3)
    )
    found = penalise(t, torch.tensor([0.1, 0.2, -0.3]))
    torch.testing.assert_close(found.rewards, torch.tensor([-0.1, 0.8, 0.3]))
    torch.testing.assert_close(found.scores[:2], torch.tensor([0.7, 0.3]))
    assert found.scores[2].isnan(), "a row that could not be scored stays so"
    torch.testing.assert_close(torch.zeros(2).index_add(0, found.row, found.rewards), found.scores[:2])
    config = AlgorithmConfig(norm_adv_by_std=False)
    by_score = load_method("advantage", "grpo", "setting")(found, config).advantages
    torch.testing.assert_close(by_score, torch.tensor([0.2, 0.2, -0.2]))
    by_token = load_method("advantage", "reinforce", "setting")(found, config).advantages
    torch.testing.assert_close(by_token, torch.tensor([0.7, 0.8, 0.3]))


REFUSED = {
    "gradient of k1 is that of log p, whose mean over samples is 0": {"kl_loss_coef": 0.1, "kl_estimator": "k1"},
    "corrects a gradient, and a reward has none": {"kl_reward_coef": 0.1, "kl_estimator": "k3_unbiased"},
    "there is nothing to control": {"kl_control": {"kind": "adaptive"}},
    "needs the log-probs of the policy at the start of the step": {
        "kl_reward_coef": 0.1,
        "proximal": "behaviour",
        "correction": {"kind": "none"},
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_do_nothing_is_refused(why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AlgorithmConfig.model_validate(REFUSED[why])


def test_estimators_that_read_scores_as_they_are_take_no_kl_from_them() -> None:
    plain = {name for name, method in methods("advantage").items() if method.plain_scores}
    assert "gdpo" in plain
    for name in plain:
        with pytest.raises(ValidationError, match=f"adv_estimator {name} reads scores as they were given"):
            AlgorithmConfig.model_validate({"adv_estimator": name, "kl_reward_coef": 0.1})


# --- coefficients that move ------------------------------------------------------------------------------


def coefficients(**algorithm: Any) -> Coefficients:
    return Coefficients(AlgorithmConfig.model_validate(algorithm), total_steps=4)


@pytest.mark.parametrize(("kl", "name"), [(0.5, "a"), (0.0, "b"), (0.11, "c")])
def test_published_adaptive_kl(kl: float, name: str) -> None:
    adaptive = coefficients(kl_reward_coef=1e-3, kl_control={"kind": "adaptive", "target": 0.1, "horizon": 10000})
    assert adaptive.of_step(0).kl_reward_coef == 1e-3
    adaptive.observe(torch.ones(512), torch.full((512,), kl), torch.arange(512))
    assert adaptive.of_step(1).kl_reward_coef == pytest.approx(VECTORS["adaptive_kl"][name], abs=1e-8)
    again = coefficients(kl_reward_coef=1e-3, kl_control={"kind": "adaptive"})
    again.restore(json.loads(json.dumps(adaptive.state())))
    assert again.of_step(1) == adaptive.of_step(1)


def test_the_kl_that_counts_is_a_mean_over_trajectories() -> None:
    assert mean_over_rows(torch.tensor([0.1, 0.3, 1.0]), torch.tensor([4, 4, 9])) == (pytest.approx(0.6), 2)


def test_linear_and_fixed_coefficients_have_no_state() -> None:
    linear = coefficients(kl_loss_coef=0.1, kl_control={"kind": "linear"})
    assert [linear.of_step(version).kl_loss_coef for version in range(5)] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0])
    fixed = coefficients(kl_loss_coef=0.1, entropy_coeff=0.01)
    for each in (linear, fixed):
        each.observe(torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.long))
        assert each.state() == {}
    used = fixed.of_step(1)
    assert (used.kl_loss_coef, used.entropy_coeff) == (0.1, 0.01)
    assert fixed.report(used) == {"kl_coef": 0.1, "entropy_coeff": 0.01}


def test_adaptive_entropy() -> None:
    controller = EntropyController(0.01, EntropyControlConfig(target=0.2, delta=0.005))
    found = []
    for entropy in (0.1, 0.2, 0.1, 0.3, 0.1, 0.5, 0.5, 0.5, 0.5, 0.1):
        controller.observe(entropy)
        found.append(controller.applied)
    assert found == pytest.approx([0.015, 0.02, 0.025, 0.0, 0.025, 0.0, 0.0, 0.0, 0.0, 0.01])
    again = EntropyController(0.01, EntropyControlConfig(target=0.2))
    again.restore(controller.state())
    assert again.state() == controller.state()
