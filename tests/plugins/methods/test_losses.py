"""Policy losses of the plug-in against the published values."""

from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.ratios import row_mean
from asyncrl.algorithms.selections import Selections
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.methods.selections import token_covariance
from tests.rigs.policy_tokens import GIVEN, ROW, VECTORS, close, flat, gradient, loss_of, tokens, total
from tests.unit.asyncrl.test_policy_losses import FAR, far_tokens
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
