"""Policy losses beyond PPO against the published values, their gradients, and the house rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.ratios import PolicyTokens
from asyncrl.algorithms.selections import Selections
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.installed_methods import methods
from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO
from tests.rigs.policy_tokens import GIVEN, ROW, VECTORS, close, flat, gradient, loss_of, tokens, total

pytestmark = pytest.mark.usefixtures("one_thread")
LOSSES = list(methods("policy_loss"))


# --- published values ----------------------------------------------------------------------------------


def test_gspo() -> None:
    given = VECTORS["gspo"]
    loss, config = loss_of("gspo", tokens())
    assert (config.clip_ratio_low, config.clip_ratio_high) == (3e-4, 4e-4), "the paper's, without being asked"
    close(loss.token_loss, torch.tensor(given["seq_loss"])[ROW])
    close(total(loss, config.loss_agg_mode), given["loss"])
    moved = tokens(flat(GIVEN["logp"]).requires_grad_())
    free = {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    expected = -flat(GIVEN["adv"]) * torch.tensor(given["seq_ratio"])[ROW]
    close(gradient("gspo", moved, **free), expected)


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


def far_tokens(distances: list[float], advantage: float) -> PolicyTokens:
    """One row whose log-probs have moved by these distances since it was sampled; all are unlikely."""
    moved = torch.tensor(distances)
    old = torch.full_like(moved, -200.0)
    columns = (old, old, torch.full_like(moved, advantage), torch.zeros(len(moved), dtype=torch.long))
    return PolicyTokens((old + moved).requires_grad_(), *columns, marked=torch.ones(len(moved), dtype=torch.bool))


FAR = [-150.0, -25.0, -20.5, -3.0, 3.0, 20.5, 25.0, 150.0]


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


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_single_update_is_the_corrected_policy_gradient(name: str) -> None:
    """What docs/algorithms.md says of the defaults: proximal and target policy are one, the behaviour's is older."""
    logprobs = flat(GIVEN["logp"]).requires_grad_()
    of = tokens(logprobs, proximal_logprobs=logprobs.detach())
    loss, config = loss_of(name, of)
    weights = correct(of, config.correction).weights
    found = torch.autograd.grad((weights * loss.token_loss).sum(), logprobs)[0]
    expected = -flat(GIVEN["adv"]) * flat(GIVEN["ratio"]).clamp(max=2)
    close(found, expected, 1e-6)


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
