"""Policy losses beyond PPO against the published values, their gradients, and the house rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import PolicyLoss, token_weights
from asyncrl.algorithms.ratios import PolicyTokens, row_mean
from asyncrl.algorithms.selections import Selections
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import methods
from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO
from asyncrl_plugins.methods.selections import token_covariance
from tests.rigs.provenance import provenance_of
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
GIVEN = VECTORS["loss_inputs"]
MASK = torch.tensor(GIVEN["mask"]).bool()
ROW = torch.arange(2)[:, None].expand(2, 4)[MASK]
LOSSES = list(methods("policy_loss"))


def flat(lines: list[list[float]]) -> torch.Tensor:
    """The unmasked tokens of a padded [2, 4]."""
    return torch.tensor(lines)[MASK]


def tokens(logprobs: torch.Tensor | None = None, **replaced: torch.Tensor) -> PolicyTokens:
    old = flat(GIVEN["old_logp"])
    logprobs = flat(GIVEN["logp"]) if logprobs is None else logprobs
    columns: dict[str, Any] = {"proximal_logprobs": old, "behaviour_logprobs": old, "advantages": flat(GIVEN["adv"])}
    marked = torch.zeros(len(old), dtype=torch.bool)
    of_hybrids = {"provenance": provenance_of(ROW), "entropies": old.neg(), "scores": old.exp()}
    return PolicyTokens(**({"logprobs": logprobs, "row": ROW, "marked": marked} | columns | of_hybrids | replaced))


def loss_of(name: str, of: PolicyTokens, **settings: Any) -> tuple[PolicyLoss, AlgorithmConfig]:
    config = AlgorithmConfig(policy_loss=name, **settings)
    return load_method("policy_loss", name, "policy_loss")(of, config), config


def total(loss: PolicyLoss, mode: str) -> torch.Tensor:
    return (token_weights(ROW, mode, max_response_length=4) * loss.token_loss).sum()


def gradient(name: str, of: PolicyTokens | None = None, **settings: Any) -> torch.Tensor:
    """Of each token's loss by its own log-prob."""
    made = of or tokens(flat(GIVEN["logp"]).requires_grad_())
    loss, _ = loss_of(name, made, **settings)
    return torch.autograd.grad(loss.token_loss.sum(), made.logprobs)[0]


def close(got: torch.Tensor, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)


# --- published values ----------------------------------------------------------------------------------


def test_gspo_and_luspo() -> None:
    given = VECTORS["gspo"]
    loss, config = loss_of("gspo", tokens())
    assert (config.clip_ratio_low, config.clip_ratio_high) == (3e-4, 4e-4), "the paper's, without being asked"
    close(loss.token_loss, torch.tensor(given["seq_loss"])[ROW])
    close(total(loss, config.loss_agg_mode), given["loss"])
    moved = tokens(flat(GIVEN["logp"]).requires_grad_())
    free = {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    expected = -flat(GIVEN["adv"]) * torch.tensor(given["seq_ratio"])[ROW]
    close(gradient("gspo", moved, **free), expected)
    length_weighted, config = loss_of("luspo", tokens(), clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    close(total(length_weighted, config.loss_agg_mode), (4 * given["seq_loss"][0] + 3 * given["seq_loss"][1]) / 2)


def test_gmpo() -> None:
    given = VECTORS["gmpo"]
    loss, config = loss_of("gmpo", tokens())
    close(loss.token_loss, (-torch.tensor([1.0, -1.0]) * torch.tensor(given["seq_ratio"]))[ROW])
    close(total(loss, config.loss_agg_mode), given["loss"])


@pytest.mark.parametrize(
    ("name", "settings", "vector"),
    [
        ("cispo", {"clip_ratio_low": 0.2}, "cispo_.2_.28"),
        ("gpg", {}, "gpg_loss"),
    ],
)
def test_published_token_means(name: str, settings: dict[str, Any], vector: str) -> None:
    loss, _ = loss_of(name, tokens(), **settings)
    if "token_loss" in VECTORS[vector]:
        close(loss.token_loss, flat(VECTORS[vector]["token_loss"]))
    close(total(loss, "token-mean"), VECTORS[vector]["token_mean"])


def test_cispo_keeps_every_tokens_gradient() -> None:
    clipped = flat(GIVEN["ratio"]).clamp(0.8, 1.28)
    close(gradient("cispo", clip_ratio_low=0.2), -clipped * flat(GIVEN["adv"]))


def test_sapo() -> None:
    loss, config = loss_of("sapo", tokens())
    close(loss.token_loss, -flat(GIVEN["adv"]) * flat(VECTORS["sapo"]["gate"]))
    close(total(loss, config.loss_agg_mode), VECTORS["sapo"]["seq_mean_token_mean"])
    close(gradient("sapo"), -flat(GIVEN["adv"]) * flat(VECTORS["sapo_grad"]["d_gate_d_logp"]))


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


OF_ONE_UPDATE = ("ppo", "gspo", "luspo", "gmpo", "cispo", "sapo", "aspo")


@pytest.mark.parametrize("name", OF_ONE_UPDATE)
def test_a_single_update_is_the_corrected_policy_gradient(name: str) -> None:
    """What docs/algorithms.md says of the defaults: proximal and target policy are one, the behaviour's is older."""
    logprobs = flat(GIVEN["logp"]).requires_grad_()
    of = tokens(logprobs, proximal_logprobs=logprobs.detach())
    loss, config = loss_of(name, of)
    weights = correct(of, config.correction).weights
    found = torch.autograd.grad((weights * loss.token_loss).sum(), logprobs)[0]
    expected = -flat(GIVEN["adv"]) * flat(GIVEN["ratio"]).clamp(max=2)
    if name == "gmpo":  # a trajectory's loss is that of each of its tokens, so that its weights are shared, too
        expected = -flat(GIVEN["adv"]) * row_mean(weights, ROW)
    close(found, expected, 1e-6)


def test_kimi_pulls_back_to_the_behaviour_policy() -> None:
    difference = flat(GIVEN["logp"]) - flat(GIVEN["old_logp"])
    close(gradient("kimi", kimi={"tau": 0.5}), -flat(GIVEN["adv"]) + 0.5 * difference)


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


# --- for every loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("chord_phi", "srft")])
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """Where target, proximal and behaviour policy are one. chord_phi has a share of it, srft no advantages."""
    same = flat(GIVEN["old_logp"]).requires_grad_()
    found = gradient(name, tokens(same))
    close(found, -flat(GIVEN["adv"]), 1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_trajectory_of_another_row_changes_nothing(name: str) -> None:
    """What a micro-batch holds besides does not reach a row's loss."""
    whole, _ = loss_of(name, tokens())
    for row in (0, 1):
        of_row = row == ROW
        alone, _ = loss_of(name, tokens().of_tokens(of_row))
        close(alone.token_loss, whole.token_loss[of_row])
