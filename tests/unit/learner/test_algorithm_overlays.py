"""The overlay of each algorithm: it loads, it is short, and it trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.config import yaml_text
from asyncrl.config.load import load_config
from asyncrl.config.method_settings import PapoConfig
from asyncrl.config.methods import KINDS, methods
from asyncrl.config.overlays import FOLDERS, shipped_overlays
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from asyncrl.models.processing import PromptProcessor
from learner.training.batch import make_batch
from learner.training.critic import Critic
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny import ROOT

OVERLAYS = shipped_overlays("algorithms")
OF_TURNS = [name for name, method in methods("advantage").items() if "turns" in method.needs]
"""Overlays of estimators that need an environment, by the same names."""
ENVIRONMENT = {"tools": ["calculator"], "workers": 8, "limits": {"tokens_per_turn": 4}}


def over_the_demo(name: str, overlay: str) -> RunConfig:
    """With an environment where the overlay needs one."""
    environment = [f"environment.{key}={value}" for key, value in ENVIRONMENT.items()] if name in OF_TURNS else []
    return load_config(GRPO, [*environment, overlay])


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_short_says_what_it_is_and_loads_over_the_demo(name: str) -> None:
    first, *lines = OVERLAYS[name].read_text().splitlines()
    assert first.startswith("# ")
    assert 2 <= len(lines) <= 10
    config = over_the_demo(name, name)
    others = [chosen.name for chosen in config.algorithm.chosen_methods]
    assert config.algorithm.adv_estimator in others
    assert over_the_demo(name, str(OVERLAYS[name])) == config


def test_every_method_has_an_overlay_that_uses_it() -> None:
    algorithms = [over_the_demo(name, name).algorithm for name in OVERLAYS]
    used = {method.name for algorithm in algorithms for method in algorithm.chosen_methods}
    used |= {name for algorithm in algorithms for name in algorithm.filters}
    there = {name for kind in KINDS for name in methods(kind)}
    assert there - used == set()


def test_they_are_where_a_clone_is_looked_through_and_in_the_package() -> None:
    for kind, folder in FOLDERS.items():
        assert (ROOT / "configs" / kind).resolve() == folder
        assert Path("asyncrl") / kind / "overlays" == folder.relative_to(ROOT)
    assert not OVERLAYS.keys() & shipped_overlays("tasks").keys()


@pytest.mark.usefixtures("one_thread")
def test_every_overlay_takes_steps_whose_numbers_are_finite(make_config: Callable[..., RunConfig]) -> None:
    """One model and one batch for all; the weights are put back before each."""
    base = make_config(batch={"group_size": 8})
    engine = TorchEngine(base, base.learner.optim, 100)
    engine.prepare()
    start = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    processor = PromptProcessor(base.model)
    made = make_batch(made_up_batch(base, processor).received, processor, papo=PapoConfig())
    for name, file in OVERLAYS.items():
        sections = {k: v for k, v in yaml_text.parse(file.read_text(), name)[0].items() if k != "reward"}
        environment = {"environment": ENVIRONMENT} if name in OF_TURNS else {}
        config = make_config(batch={"group_size": 8}, **sections, **environment)
        seen = made_up_batch(config, processor) if "greedy_row" in config.algorithm.needs else made
        batch = replace(seen, scores=2 * seen.scores, components={"only": seen.scores})
        engine.model.load_state_dict(start)
        engine.optimizer.state.clear()
        critic = Critic(config, 100) if "critic" in config.algorithm.needs else None
        if critic:
            critic.prepare()
        reference = Reference(config) if config.reference_model else None
        if reference:
            reference.prepare()
        step = LearnerStep(Roles(engine, critic, reference), config)
        for version in (3, config.critic.warmup_steps + 4):
            metrics = step(batch, version)
            assert all(math.isfinite(value) for key, value in metrics.items() if key != "critic/explained_variance"), (
                name
            )
        assert metrics["grad_norm"] > 0, name
        moved = any(not torch.equal(start[key], tensor) for key, tensor in engine.model.state_dict().items())
        assert moved, name
