"""Policy losses beyond PPO against the published values, their gradients, and the house rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.config.installed_methods import methods
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
