"""PAPO: images with black patches are made the same again, and the loss is the published one."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.config.schema import RunConfig
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.perception.papo import blacken_patches, masked_prompt, perception_loss
from asyncrl_plugins.perception.settings import PapoConfig
from learner.training.batch import make_batch
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import KeepGradients, made_up_batch
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
VECTOR = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())["papo"]


def test_published_values() -> None:
    clean, masked = (torch.tensor(VECTOR[key], requires_grad=True) for key in ("logp_clean", "logp_masked"))
    found = perception_loss(clean, masked, None, None, PapoConfig(kl_coef=0.02))
    torch.testing.assert_close(found.kl, torch.tensor(VECTOR["k3"]), atol=1e-6, rtol=1e-6)
    assert float(found.token_loss.detach().mean()) == pytest.approx(VECTOR["loss_term_gamma02"], abs=1e-6)
    of_clean, of_masked = torch.autograd.grad(found.token_loss.sum(), (clean, masked))
    assert (of_clean < 0).all(), "a step down makes the tokens likelier with their images"
    assert (of_masked > 0).all(), "and less likely without"
    with_entropy = perception_loss(clean, masked, clean * 0 + 1, clean * 0 + 2, PapoConfig(kl_coef=0.02))
    torch.testing.assert_close(with_entropy.token_loss, found.token_loss + 0.03 * 3)
    far = perception_loss(clean * 0 - 20, masked * 0, None, None, PapoConfig(kl_coef=1.0))
    assert far.kl.tolist() == [10.0, 10.0]


def test_patches_are_black_by_the_seed_and_the_size_stays() -> None:
    image = Image.new("RGB", (140, 75), "white")
    masked = np.asarray(blacken_patches(image, 14, 0.6, seed=3))
    assert masked.shape == (75, 140, 3)
    assert set(np.unique(masked)) == {0, 255}
    assert 0.4 < (masked == 0).mean() < 0.8
    corner = masked[:14, :14]
    assert (corner == corner[0, 0]).all(), "whole patches"
    assert (masked == np.asarray(blacken_patches(image, 14, 0.6, seed=3))).all()
    assert (masked != np.asarray(blacken_patches(image, 14, 0.6, seed=4))).any()
    assert not np.asarray(blacken_patches(image, 14, 1.0, seed=3)).any()


def test_the_loss_is_lower_by_the_kl_of_tokens_that_see_images(make_config: Callable[..., RunConfig]) -> None:
    def step(**algorithm: dict[str, float]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        metrics = LearnerStep(Roles(engine), make_config(algorithm=algorithm).step_settings)(batch, 3)
        return metrics, engine.gradients

    config = make_config()
    batch = made_up_batch(config, PromptProcessor(config.model))
    engine = KeepGradients(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    before, plain_gradients = step()
    assert "kl_prcp" not in before
    with_kl, gradients = step(papo={"kl_coef": 0.5, "entropy_coeff": 0.0})
    assert with_kl["kl_prcp"] > 0
    assert with_kl["loss"] == pytest.approx(before["loss"] - 0.5 * with_kl["kl_prcp"], rel=1e-4)
    assert any(not torch.equal(gradient, plain_gradients[name]) for name, gradient in gradients.items())
    with_entropy, _ = step(papo={"kl_coef": 0.5, "entropy_coeff": 0.1})
    extra = with_entropy["loss"] - with_kl["loss"]
    assert extra == pytest.approx(0.2 * with_kl["entropy"], rel=0.2), "both entropies, of which one is known"


def test_a_step_that_is_made_again_sees_the_same_patches(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    batch = made_up_batch(config, PromptProcessor(config.model))
    again = make_batch(batch.received, PromptProcessor(config.model))
    for groups in zip(batch.train_groups, again.train_groups, strict=True):
        ours, theirs = (
            masked_prompt(group.prompt, item, made.processor, PapoConfig()).pixel_values
            for group, made in zip(groups, (batch, again), strict=True)
            for item in [made.received[int(made.groups[group.completions[0].row])]]
        )
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
        assert groups[0].prompt.pixel_values is not None
        assert not torch.equal(ours, groups[0].prompt.pixel_values)


def test_the_memory_of_the_second_pass_is_planned(make_config: Callable[..., RunConfig]) -> None:
    plain = rehearse(make_config()).passing
    assert rehearse(make_config(algorithm={"papo": {"kl_coef": 0.01}})).passing > 1.5 * plain
