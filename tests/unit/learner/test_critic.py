"""A critic learns the values of states, whatever the cut into micro-batches, and comes back from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.diagnostics import explained_variance
from asyncrl.algorithms.losses import value_loss
from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from learner.training.batch import Batch
from learner.training.critic import Critic
from learner.training.engine import TorchEngine
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
SETTINGS: dict[str, Any] = {
    "data": {"max_prompt_length": 64},
    "algorithm": {"adv_estimator": "gae"},
    "critic": {"optim": {"lr": 1e-3}},
}


def engines(config: RunConfig) -> tuple[TorchEngine, Critic, Batch]:
    actor, critic = TorchEngine(config, config.learner.optim, 1), Critic(config, 1)
    actor.prepare()
    critic.prepare()
    return actor, critic, made_up_batch(config, PromptProcessor(config.model))


def weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def test_published_value_loss() -> None:
    given = VECTORS["value_loss_eps.5"]
    columns = (torch.tensor(given[name]) for name in ("v", "v_old", "ret"))
    loss = value_loss(*columns, clip_range=0.5)
    assert float(loss.token_loss.mean()) == pytest.approx(given["loss"])
    assert loss.clipped.tolist() == [True, False]


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.ones(3), returns) == 0
    assert explained_variance(torch.ones(3), torch.ones(3)) != explained_variance(torch.ones(3), torch.ones(3)), "NaN"


def test_a_critic_learns_and_warms_up_alone(make_config: MakeConfig) -> None:
    config = make_config(**SETTINGS | {"critic": {"optim": {"lr": 1e-3}, "clip_range": 0.0, "warmup_steps": 12}})
    actor, critic, batch = engines(config)
    step, before = LearnerStep(actor, config, critic), weights(actor)
    metrics = [step(batch, version) for version in range(12)]
    assert metrics[0]["critic/value"] == 0, "the head begins with zeros"
    assert metrics[0]["critic/explained_variance"] == 0
    assert metrics[-1]["critic/explained_variance"] > 0.1
    assert metrics[-1]["critic/loss"] < metrics[0]["critic/loss"]
    assert all(torch.equal(before[name], now) for name, now in weights(actor).items()), "the policy waits"
    assert "grad_norm" not in metrics[-1]
    step(batch, 12)
    assert any(not torch.equal(before[name], now) for name, now in weights(actor).items())


def test_micro_batching_changes_nothing(make_config: MakeConfig) -> None:
    found = []
    for budget in (72, 4096):
        config = make_config(**SETTINGS, batch={"tokens_per_microbatch": budget})
        actor, critic, batch = engines(config)
        metrics = LearnerStep(actor, config, critic)(batch, 0)
        found.append((metrics, weights(critic)))
    (many, of_many), (one, of_one) = found
    for name in ("loss", "critic/loss", "critic/grad_norm", "grad_norm"):
        assert many[name] == pytest.approx(one[name], rel=1e-4), name
    assert all(torch.allclose(of_many[name], of_one[name], atol=2e-4) for name in of_one)


def test_a_critic_comes_back_bit_for_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**SETTINGS)
    actor, critic, batch = engines(config)
    step = LearnerStep(actor, config, critic)
    step(batch, 0)
    critic.save(tmp_path / "critic")
    actor.save(tmp_path)
    again = Critic(config, 1)
    again.prepare()
    again.load(tmp_path / "critic")
    assert all(torch.equal(now, weights(again)[name]) for name, now in weights(critic).items())
    assert critic.sleep() > 0
    critic.wake()
