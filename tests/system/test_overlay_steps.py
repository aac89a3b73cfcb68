"""The overlay of each algorithm trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.config import yaml_text
from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Critic, Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny import make_tiny_model
from tests.unit.learner.test_algorithm_overlays import ENVIRONMENT, OF_TEACHERS, OF_TURNS, OVERLAYS


@pytest.mark.usefixtures("one_thread")
def test_every_overlay_takes_steps_whose_numbers_are_finite(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """One model and one batch for all; the weights are put back before each."""
    if OF_TEACHERS:
        make_tiny_model(tmp_path / "teacher", intermediate=256)
    base = make_config(batch={"group_size": 8})
    engine = TorchEngine(base.model_settings, base.learner.optim, 100)
    engine.prepare()
    start = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    processor = PromptProcessor(base.model)
    made = made_up_batch(base, processor)
    for name, file in OVERLAYS.items():
        sections = {k: v for k, v in yaml_text.parse(file.read_text(), name)[0].items() if k != "reward"}
        environment = {"environment": ENVIRONMENT} if name in OF_TURNS else {}
        teacher = {"reference": {"path": str(tmp_path / "teacher")}} if name in OF_TEACHERS else {}
        config = make_config(batch={"group_size": 8}, **sections, **environment, **teacher)
        seen = made_up_batch(config, processor) if "greedy_row" in config.algorithm.needs else made
        batch = replace(seen, scores=2 * seen.scores, components={"only": seen.scores})
        engine.model.load_state_dict(start)
        engine.updates.optimizer.state.clear()
        critic = Critic(config.critic_settings, config.critic, 100) if "critic" in config.algorithm.needs else None
        if critic:
            critic.prepare()
        reference = Reference(config.reference_settings, config.reference) if config.reference_model else None
        if reference:
            reference.prepare()
        step = LearnerStep(Roles(engine, critic, reference), config.step_settings)
        for version in (3, config.critic.warmup_steps + 4):
            metrics = step(batch, version)
            assert all(math.isfinite(value) for key, value in metrics.items() if key != "critic/explained_variance"), (
                name
            )
        assert metrics["grad_norm"] > 0, name
        moved = any(not torch.equal(start[key], tensor) for key, tensor in engine.model.state_dict().items())
        assert moved, name
