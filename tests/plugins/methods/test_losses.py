"""Policy losses of the plug-in against the published values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import token_weights
from asyncrl.algorithms.ratios import row_mean
from asyncrl.algorithms.selections import Selections
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import methods
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from asyncrl_plugins.methods.losses import dppo
from asyncrl_plugins.methods.selections import token_covariance
from tests.rigs.policy_tokens import (
    FAR,
    GIVEN,
    MASK,
    ROW,
    VECTORS,
    close,
    far_tokens,
    flat,
    gradient,
    loss_of,
    tokens,
    total,
)
from tests.unit.asyncrl.test_policy_losses import test_a_single_update_is_the_corrected_policy_gradient as single_update

pytestmark = pytest.mark.usefixtures("one_thread")


def test_gmpo() -> None:
    given = VECTORS["gmpo"]
    loss, config = loss_of("gmpo", tokens())
    close(loss.token_loss, (-torch.tensor([1.0, -1.0]) * torch.tensor(given["seq_ratio"]))[ROW])
    close(total(loss, config.loss_agg_mode), given["loss"])


def test_sapo() -> None:
    loss, config = loss_of("sapo", tokens())
    close(loss.token_loss, -flat(GIVEN["adv"]) * flat(VECTORS["sapo"]["gate"]))
    close(total(loss, config.loss_agg_mode), VECTORS["sapo"]["seq_mean_token_mean"])
    close(gradient("sapo"), -flat(GIVEN["adv"]) * flat(VECTORS["sapo_grad"]["d_gate_d_logp"]))


def test_gmpo_moves_every_token_of_a_row_whose_mean_ratio_has_a_size() -> None:
    """The bound is of the row's ratio, exp(mean log r): a token of log r = 30 has its share of the gradient."""
    for advantage, distances in ((-1.0, [30.0, 5.0, 3.0]), (-2.0, [24.0, 1.0]), (1.0, [-40.0, -0.1, 0.2])):
        found = gradient("gmpo", far_tokens(distances, advantage))
        mean = torch.tensor(distances).mean().exp()
        close(found / mean, torch.full_like(found, -advantage), 1e-4)


def test_luspo_is_gspo_times_the_length() -> None:
    given = VECTORS["gspo"]
    length_weighted, config = loss_of("luspo", tokens(), clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    close(total(length_weighted, config.loss_agg_mode), (4 * given["seq_loss"][0] + 3 * given["seq_loss"][1]) / 2)


@pytest.mark.parametrize("name", ["luspo", "aspo", "sapo"])
def test_a_single_update_is_the_corrected_policy_gradient(name: str) -> None:
    single_update(name)


def test_a_single_update_of_gmpo_gives_each_token_the_mean_weight_of_its_trajectory() -> None:
    """A trajectory's loss is that of each of its tokens, so that its weights are shared, too."""
    logprobs = flat(GIVEN["logp"]).requires_grad_()
    of = tokens(logprobs, proximal_logprobs=logprobs.detach())
    loss, config = loss_of("gmpo", of)
    weights = correct(of, config.correction).weights
    found = torch.autograd.grad((weights * loss.token_loss).sum(), logprobs)[0]
    close(found, -flat(GIVEN["adv"]) * row_mean(weights, ROW), 1e-6)


def test_aspo_flips_the_weight_of_good_tokens() -> None:
    """By gradients: the value of 1/r has the wrong sign of it."""
    found = gradient("aspo", clip_ratio_high=0.2)
    close(found[:4], -torch.tensor(VECTORS["aspo_effective_weight_on_dlogpi"]["positive_row"]))
    close(found[4:], gradient("ppo", clip_ratio_high=0.2)[4:])


def test_vespo_and_topr_weigh_by_the_behaviour_policy() -> None:
    given = VECTORS["vespo_gate"]
    for sign, advantage in (("pos", 1.0), ("neg", -1.0)):
        for log_ratio, gate in given[sign].items():
            one = tokens(
                torch.tensor([float(log_ratio)], requires_grad=True),
                behaviour_logprobs=torch.zeros(1),
                advantages=torch.tensor([advantage]),
                row=torch.zeros(1, dtype=torch.long),
            )
            close(gradient("vespo", one), [-gate * advantage])
    close(
        gradient("topr"),
        -flat(GIVEN["adv"]) * torch.where(flat(GIVEN["adv"]) > 0, 1.0, flat(GIVEN["ratio"]).clamp(max=1)),
    )


def test_topr_reports_the_weights_that_it_cut() -> None:
    """Of bad tokens above 1: good ones have no weight to cut."""
    loss, _ = loss_of("topr", tokens())
    cut = (flat(GIVEN["adv"]) < 0) & (flat(GIVEN["ratio"]) > 1)
    assert 0 < int(cut.sum()) < len(cut)
    assert torch.equal(loss.indicators["clip_fraction"], cut)


def test_kimi_pulls_back_to_the_behaviour_policy() -> None:
    difference = flat(GIVEN["logp"]) - flat(GIVEN["old_logp"])
    close(gradient("kimi", kimi={"tau": 0.5}), -flat(GIVEN["adv"]) + 0.5 * difference)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_penalties_lead_back_however_far_the_policy_has_moved(advantage: float) -> None:
    distances = torch.tensor(FAR)
    found = gradient("kimi", far_tokens(FAR, advantage), kimi={"tau": 0.5})
    close(found, -advantage + 0.5 * distances, 1e-4)
    surrogate = torch.where(distances.abs() < 20, -advantage * distances.exp(), 0.0)
    close(
        gradient("kl_cov", far_tokens(FAR, advantage), kl_cov={"coef": 3.0}), surrogate + 3.0 * distances.sign(), 1e-4
    )


def test_covariance_losses() -> None:
    logprobs = flat(GIVEN["logp"])
    t = Trajectories(torch.zeros(2), torch.zeros(2), ROW, torch.zeros(7), proximal_logprobs=logprobs)
    credit = Credit(flat(GIVEN["adv"]))
    close(token_covariance(t, credit), flat(VECTORS["token_cov"]["cov"]))
    given = VECTORS["kl_cov_ratio.2_coef1"]
    config = AlgorithmConfig.model_validate({"policy_loss": "kl_cov", "top_covariance": {"fraction": 0.2}})
    marked = Selections(config)(t, credit).marked
    assert marked is not None
    assert marked.nonzero()[:, 0].tolist() == given["topk_index"]
    loss, _ = loss_of("kl_cov", tokens(marked=marked))
    close(total(loss, "token-mean"), given["token_mean"])

    bounds = {"fraction": 0.3, "lower": 0.0, "upper": 1.0}
    config = AlgorithmConfig.model_validate({"policy_loss": "clip_cov", "random_covariance": bounds})
    marked = Selections(config)(t, credit).marked
    assert marked is not None
    assert int(marked.sum()) == 2, "of the three whose covariance is within the bounds"
    assert ((token_covariance(t, credit) > 0) | ~marked).all()
    again = Selections(config)(t, credit).marked
    assert again is not None
    assert torch.equal(marked, again), "the same tokens when a step is made again"
    moved = tokens(logprobs.clone().requires_grad_(), marked=marked)
    found = gradient("clip_cov", moved)
    assert ((found == 0) | ~marked).all()
    assert Selections(AlgorithmConfig())(t, credit).marked is None


def test_dppo() -> None:
    given = VECTORS["dppo_tv_.2"]
    shaped = tokens(flat(GIVEN["logp"]).requires_grad_())
    policy = dppo(shaped, AlgorithmConfig.model_validate({"policy_loss": "dppo", "dppo": {"kl_tau": 0.0}}))
    assert policy.indicators["clip_fraction_dppo"].tolist() == torch.tensor(given["masked"])[MASK].tolist()
    close((token_weights(ROW, "token-mean", max_response_length=4) * policy.token_loss).sum(), given["loss_token_mean"])
    (gradient,) = torch.autograd.grad(policy.token_loss.sum(), shaped.logprobs)
    assert ((gradient == 0) == policy.indicators["clip_fraction_dppo"]).all()
    with_kl = dppo(shaped, AlgorithmConfig.model_validate({"policy_loss": "dppo", "dppo": {"kl_tau": 0.5}})).token_loss
    close(with_kl - policy.token_loss, 0.5 * (shaped.logprobs - shaped.behaviour_logprobs) ** 2)


@pytest.mark.parametrize("updates", [1, 4])
def test_m2po_is_the_ratio_to_the_behaviour_policy_at_the_tokens_that_it_keeps(updates: int) -> None:
    """-A pi_target / pi_behaviour, no clip, whether or not the policy has moved since the step began (arXiv
    2510.01161)."""
    words = ["m2po", f"algorithm.updates_per_batch={updates}", "algorithm.m2po.threshold=1.0"]
    config = load_config(GRPO, words).algorithm
    logprobs = flat(GIVEN["logp"]).requires_grad_()
    proximal = logprobs.detach() if updates == 1 else flat(GIVEN["old_logp"])
    behaviour = proximal - torch.tensor([0.1, 1.2, -0.2, 0.05, -0.1, 2.5, 0.0])
    of = tokens(logprobs, proximal_logprobs=proximal, behaviour_logprobs=behaviour)
    t = Trajectories(torch.zeros(2), torch.zeros(2), ROW, behaviour, proximal_logprobs=proximal)
    selected = Selections(config)(t, Credit(flat(GIVEN["adv"])))
    dropped = selected.from_loss["m2po"]
    assert dropped.nonzero()[:, 0].tolist() == [5]
    correction = correct(of, config.correction, selected.from_loss)
    loss = correction.weights * load_method("policy_loss", config.policy_loss, "policy_loss")(of, config).token_loss
    found = torch.autograd.grad(loss.sum(), logprobs)[0]
    ratio = (logprobs.detach() - behaviour).exp()
    close(found, torch.where(dropped, 0.0, -flat(GIVEN["adv"]) * ratio))


def test_the_penalty_of_dppo_leads_back_however_far_the_policy_has_moved() -> None:
    found = gradient("dppo", far_tokens(FAR, 0.0), dppo={"kl_tau": 0.5})
    close(found, torch.tensor(FAR), 1e-4)


@pytest.mark.parametrize("upper", [20.0, 2.0, 100.0])
def test_a_weight_of_dppo_is_truncated_and_keeps_its_gradient(upper: float) -> None:
    """As in verl: -A sg[min(r, upper)] log p, at unlikely tokens, whose probability does not move."""
    moved = torch.tensor([-1.0, 0.4, 2.9, 3.1, 12.0, 30.0])
    given = {"kl_tau": 0.0} | ({} if upper == 20 else {"upper": upper})
    of = far_tokens(moved.tolist(), -1.5)
    close(gradient("dppo", of, dppo=given), 1.5 * moved.exp().clamp(max=upper), 1e-4)
    indicators = loss_of("dppo", of, dppo=given)[0].indicators
    assert torch.equal(indicators["truncation_fraction_dppo"], moved.exp() > upper)


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"kind": "icepop"}, "dppo already weighs by pi_target / pi_behaviour"),
        ({"kind": "none", "masks": [{"kind": "dppo_tv"}]}, "leave the dppo_tv mask out"),
    ],
)
def test_dppo_is_not_corrected_twice(correction: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        AlgorithmConfig.model_validate({"policy_loss": "dppo", "correction": correction})


@pytest.mark.parametrize("name", [name for name, method in methods("policy_loss").items() if method.weighs_behaviour])
def test_truncated_sampling_is_refused_by_losses_of_the_ratio_to_the_behaviour(
    make_config: Callable[..., RunConfig], name: str
) -> None:
    with pytest.raises(ValidationError, match=rf"policy_loss is {name} and rollout.top_p=0.9: .*\(rollout.top_p=1\)"):
        make_config(algorithm={"policy_loss": name, "correction": {"kind": "none"}}, rollout={"top_p": 0.9})
