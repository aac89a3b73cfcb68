"""Features of images are computed once while nothing that makes them is trained, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from learner.training.reference import Reference
from learner.training.roles import Critic, Roles
from learner.training.step import LearnerStep
from learner.training.vision_features import VisionFeatures, frozen_vision
from tests.rigs.made_up_batch import KeepGradients, made_up_batch
from tests.rigs.tiny_families import make_family, make_llava
from tests.system.test_bad_input import image_rows, write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
FROZEN = {"freeze_vision_tower": True, "freeze_connector": True}
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": lambda folder: make_family("qwen2_5_vl", folder),
    "qwen3_vl": lambda folder: make_family("qwen3_vl", folder),
    "llava": make_llava,
}
SIZES = [(28, 40), (56, 28), (28, 28), (70, 42)]
"""Of the images in the rows: height and width in pixels."""


class CountImages(KeepGradients):
    """An engine that keeps gradients, and counts the calls of its vision tower and the images that they compute."""

    def prepare(self) -> None:
        super().prepare()
        self.calls = 0
        inner = self.model.base_model
        original = inner.get_image_features

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        inner.get_image_features = counted


@pytest.fixture(params=FAMILIES)
def make_run(request: pytest.FixtureRequest, make_config: MakeConfig, tmp_path: Path) -> Callable[..., RunConfig]:
    """A configuration whose rows have no, one and three images, in parts of groups; by its changed sections."""
    return runs_of(FAMILIES[request.param](tmp_path / "model"), make_config, tmp_path)


def runs_of(model: Path, make_config: MakeConfig, tmp_path: Path) -> Callable[..., RunConfig]:
    """Configurations of a model whose rows have no, one and three images."""
    data = {**write_rows(tmp_path, image_rows(tmp_path, SIZES) * 2), "max_prompt_length": 400}

    def make(**sections: Any) -> RunConfig:
        sections["model"] = {"path": str(model), **FROZEN, **sections.get("model", {})}
        batch = {"prompts_per_step": 6, "group_size": 4, "tokens_per_microbatch": 410}
        return make_config(data=data, batch=batch, **sections)

    return make


def take_steps(config: RunConfig, steps: int = 1) -> tuple[CountImages, list[dict[str, float]], list[Any]]:
    """The engine, and metrics and gradients of each step of one batch, whose weights stay."""
    engine = CountImages(config.model_settings, config.learner.optim, steps)
    engine.prepare()
    reference = Reference(config.reference_settings, config.reference) if config.reference_model else None
    critic = Critic(config.critic_settings, config.critic, steps) if "critic" in config.algorithm.needs else None
    for role in (reference, critic):
        if role:
            role.prepare()
    step = LearnerStep(Roles(engine, critic, reference), config.step_settings, total_steps=steps)
    batch = made_up_batch(config, PromptProcessor(config.model))
    metrics, gradients = [], []
    for _ in range(steps):
        metrics.append(step(batch, 3))
        gradients.append(engine.gradients)
    return engine, metrics, gradients


@pytest.mark.parametrize("lora", [0, 4])
def test_loss_and_gradients_stay_and_each_image_is_computed_once(make_run: Callable[..., RunConfig], lora: int) -> None:
    """Scored by policy and reference, in two updates and in parts of groups; the second step computes no image."""
    sections: dict[str, Any] = {
        "model": {"lora": {"rank": lora}},
        "algorithm": {"kl_loss_coef": 0.1, "updates_per_batch": 2},
    }
    plain, (expected,), (without,) = take_steps(make_run(**sections, learner={"vision_features_mib": 0}))
    engine, metrics, gradients = take_steps(make_run(**sections), steps=2)
    assert "vision/images" not in expected
    assert plain.calls > 1
    assert metrics[0]["vision/reused"] > 0.5
    assert metrics[1]["vision/reused"] == 1
    assert engine.calls == round(metrics[0]["vision/images"] * (1 - metrics[0]["vision/reused"]))
    for name, value in expected.items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    largest = max(float(gradient.norm()) for gradient in without.values())
    assert largest > 0
    for name, gradient in without.items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=name)
        assert torch.equal(gradients[0][name], gradients[1][name]), f"{name}: kept features are those computed"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_of_text_alone_has_no_features(make_config: MakeConfig, tmp_path: Path, family: str) -> None:
    check_text_alone(make_config, tmp_path, FAMILIES[family](tmp_path / "model"))


def check_text_alone(make_config: MakeConfig, tmp_path: Path, model: Path) -> None:
    """Check that no image is computed."""
    data = write_rows(tmp_path, [{"prompt": "no image"}] * 2)
    batch = {"prompts_per_step": 2, "group_size": 4}
    config = make_config(model={"path": str(model), **FROZEN}, data=data, batch=batch)
    engine, (metrics,), _ = take_steps(config)
    assert engine.calls == 0
    assert "vision/images" not in metrics


@pytest.mark.parametrize(
    "model",
    [
        {"freeze_connector": False},
        {"freeze_vision_tower": False},
        {"lora": {"rank": 2, "vision_tower": True}, "freeze_vision_tower": False},
    ],
    ids=str,
)
def test_what_is_trained_is_computed_each_time(make_config: MakeConfig, model: dict[str, Any]) -> None:
    engine, (metrics,), (gradients,) = take_steps(make_config(model={**FROZEN, **model}))
    assert engine.features is None
    assert not engine.facts.frozen_vision
    assert "vision/images" not in metrics
    assert any("visual" in name and gradient.any() for name, gradient in gradients.items())


def test_a_critic_of_the_same_tower_finds_the_policys_features(make_config: MakeConfig) -> None:
    config = make_config(model=FROZEN, algorithm={"adv_estimator": "gae"})
    engine, (metrics,), _ = take_steps(config)
    assert metrics["vision/images"] == 3 * 4, "scored by the critic, then trained with both"
    assert metrics["vision/reused"] == pytest.approx(2 / 3)
    assert engine.calls == 0, "the critic has computed them all"


def test_another_tower_has_another_fingerprint(make_config: MakeConfig) -> None:
    config = make_config(model=FROZEN)
    engine = CountImages(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    before = engine.facts.frozen_vision
    assert before == frozen_vision(engine.model)
    assert before != frozen_vision(engine.model.to(torch.bfloat16)), "another dtype"
    engine.model.float()
    with torch.no_grad():
        next(engine.model.model.visual.parameters()).add_(1e-3)
    assert frozen_vision(engine.model) not in ("", before)


def test_memory_is_bounded_and_a_steps_own_features_stay(make_config: MakeConfig) -> None:
    config = make_config(model=FROZEN)
    engine = CountImages(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    batch = made_up_batch(config, PromptProcessor(config.model))
    micro_batches = [engine.pack([group]) for group in batch.train_groups]
    assert len(micro_batches) == 4
    size = _features(engine, VisionFeatures(2**30), micro_batches[0])[0].nbytes

    engine.features = features = VisionFeatures(2 * size)
    for _ in range(2):
        for micro_batch in micro_batches:
            engine.states(micro_batch)
    assert features.report() == {"vision/images": 8.0, "vision/reused": 0.25}, "two of four are found again"
    engine.states(micro_batches[3])
    engine.states(micro_batches[3])
    assert features.report() == {"vision/images": 2.0, "vision/reused": 0.5}, "the older step's make room"
    assert features.report() == {}


def _features(engine: CountImages, features: VisionFeatures, micro_batch: Any) -> list[torch.Tensor]:
    inputs = features.inputs(engine.model, engine.facts.frozen_vision, micro_batch.inputs)
    return inputs["mm_encoder_outputs"]["image"].pooler_output
