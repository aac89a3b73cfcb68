"""A critic learns the values of states, whatever the cut into micro-batches, and comes back from a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.algorithms.diagnostics import explained_variance
from asyncrl.algorithms.losses import value_loss
from asyncrl.checks.inputs import check_inputs
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.output_head import hidden_states
from asyncrl.processing.processor import PromptProcessor
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import build_micro_batch
from learner.training.roles import Critic, Roles
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
    actor, critic = (
        TorchEngine(config.model_settings, config.learner.optim, 1),
        Critic(config.critic_settings, config.critic, 1),
    )
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
    step, before = LearnerStep(Roles(actor, critic), config.step_settings), weights(actor)
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
        metrics = LearnerStep(Roles(actor, critic), config.step_settings)(batch, 0)
        found.append((metrics, weights(critic)))
    (many, of_many), (one, of_one) = found
    for name in ("loss", "critic/loss", "critic/grad_norm", "grad_norm"):
        assert many[name] == pytest.approx(one[name], rel=1e-4), name
    assert all(torch.allclose(of_many[name], of_one[name], atol=2e-4) for name in of_one)


def test_a_critic_comes_back_bit_for_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**SETTINGS)
    actor, critic, batch = engines(config)
    step = LearnerStep(Roles(actor, critic), config.step_settings)
    step(batch, 0)
    (tmp_path / "critic").mkdir()
    critic.files(copies=False)(tmp_path / "critic")
    actor.files(copies=False)(tmp_path)
    again = Critic(config.critic_settings, config.critic, 1)
    again.prepare()
    again.load(tmp_path / "critic")
    assert all(torch.equal(now, weights(again)[name]) for name, now in weights(critic).items())
    assert critic.sleep() > 0
    critic.wake()


def reward_model(config: RunConfig, folder: Path, labels: int = 1, **described: Any) -> Path:
    """The policy's own weights with a head that scores sequences, as transformers saves it."""
    shutil.copytree(config.model.path, folder)
    (file,) = folder.glob("*.safetensors")
    score = torch.linspace(-1, 1, 64 * labels).view(labels, 64)
    save_file({**load_file(file), "score.weight": score}, file, metadata={"format": "pt"})
    described = {**json.loads((folder / "config.json").read_text()), **described}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def test_a_critic_begins_with_the_head_of_a_reward_model(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = reward_model(make_config(), tmp_path / "reward")
    config = make_config(**SETTINGS | {"critic": {"path": str(folder)}})
    check_inputs(config, "learner")
    _, critic, batch = engines(config)
    micro_batch = build_micro_batch(critic.model, batch.train_groups, critic.device)
    states = hidden_states(critic.model, micro_batch.inputs)[micro_batch.predict_from]
    scores = states @ torch.linspace(-1, 1, 64)
    assert scores.detach().abs().min() > 0
    torch.testing.assert_close(critic.values(micro_batch), scores)


def test_what_cannot_be_a_critic_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    of_two = make_config(**SETTINGS | {"critic": {"path": str(reward_model(make_config(), tmp_path / "two", 2))}})
    with pytest.raises(UserError, match=r"score.weight has the shape \(2, 64\).*name a reward model of one label"):
        engines(of_two)
    other = reward_model(make_config(), tmp_path / "other", model_type="qwen2_5_vl", image_token_id=7)
    said = r"critic.path is .*: model_type is qwen2_5_vl there and qwen2_vl here; image_token_id is 7 there"
    with pytest.raises(UserError, match=said):
        check_inputs(make_config(**SETTINGS | {"critic": {"path": str(other)}}), "learner")
