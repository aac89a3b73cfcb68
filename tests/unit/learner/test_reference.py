"""The reference policy: a frozen copy, one that is set to the policy or follows it, or the model without adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.published import load_published
from asyncrl.processing.processor import PromptProcessor
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.adapters import lora_config, made_up_adapter
from tests.rigs.made_up_batch import KeepGradients, made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
KL: dict[str, dict[str, Any]] = {"data": {"max_prompt_length": 64}, "algorithm": {"kl_loss_coef": 0.1}}


def engines(config: RunConfig, actor: type[TorchEngine] = TorchEngine) -> tuple[TorchEngine, Reference, Batch]:
    policy, reference = (
        actor(config.model_settings, config.learner.optim, 1),
        Reference(config.reference_settings, config.reference),
    )
    policy.prepare()
    reference.prepare()
    reference.check_fits(policy, compares_distributions=config.algorithm.kl_estimator == "full")
    return policy, reference, made_up_batch(config, PromptProcessor(config.model))


def weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_frozen_reference_stays_where_the_policy_began(make_config: MakeConfig) -> None:
    config = make_config(**KL)
    actor, reference, batch = engines(config)
    before, step = weights(reference), LearnerStep(Roles(actor, own_reference=reference), config.step_settings)
    assert equal(before, weights(actor))
    kl = [step(batch, version)["reference_kl"] for version in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[2] > kl[1] > 0
    assert equal(weights(reference), before)
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_a_reference_is_reset_to_the_policy(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**KL, reference={"reset_every_steps": 2})
    actor, reference, batch = engines(config)
    step = LearnerStep(Roles(actor, own_reference=reference), config.step_settings)
    step(batch, 0)
    assert not equal(weights(reference), weights(actor))
    step(batch, 1)
    assert equal(weights(reference), weights(actor))
    reference.files(copies=False)(tmp_path)
    again = Reference(config.reference_settings, config.reference)
    again.prepare()
    again.load(tmp_path)
    assert equal(weights(again), weights(reference))


def test_a_reset_of_the_optimiser_survives_a_resume(make_config: MakeConfig, tmp_path: Path) -> None:
    """AdamW begins anew, and a run that is resumed from just after that makes the same next step."""
    config = make_config(**KL, reference={"reset_every_steps": 2, "reset_optimizer": True})
    actor, reference, batch = engines(config)
    step = LearnerStep(Roles(actor, own_reference=reference), config.step_settings)
    step(batch, 0)
    assert actor.updates.optimizer.state
    step(batch, 1)
    assert not actor.updates.optimizer.state
    folder = tmp_path / "reference"
    folder.mkdir()
    actor.files(copies=False)(tmp_path)
    reference.files(copies=False)(folder)
    resumed, its_reference, _ = engines(config)
    resumed.model.load_state_dict(actor.model.state_dict())
    resumed.load(tmp_path)
    its_reference.load(folder)
    again = LearnerStep(Roles(resumed, own_reference=its_reference), config.step_settings)(batch, 2)
    assert again == step(batch, 2)
    assert equal(weights(resumed), weights(actor))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_average_follows_in_fp32(make_config: MakeConfig, tmp_path: Path, dtype: str) -> None:
    config = make_config(**KL, model={"dtype": dtype, "freeze_vision_tower": True}, reference={"ema": 0.9})
    actor, reference, batch = engines(config)
    step = LearnerStep(Roles(actor, own_reference=reference), config.step_settings)
    expected = [master.clone().double() for master in actor.updates.masters.stepped()]
    for version in range(3):
        step(batch, version)
        for average, master in zip(expected, actor.updates.masters.stepped(), strict=True):
            average.mul_(0.9).add_(master.double(), alpha=0.1)
    for average, found in zip(expected, reference.masters.stepped(), strict=True):
        torch.testing.assert_close(found, average.float(), rtol=1e-6, atol=1e-7)
    assert len(reference.masters.copies()) == (len(expected) if dtype == "bfloat16" else 0)
    reference.files(copies=False)(tmp_path)
    again = Reference(config.reference_settings, config.reference)
    again.prepare()
    again.load(tmp_path)
    assert equal(weights(again), weights(reference))
    assert all(torch.equal(a, b) for a, b in zip(again.masters.stepped(), reference.masters.stepped(), strict=True))


def test_it_sleeps_and_wakes_with_the_policy(make_config: MakeConfig) -> None:
    config = make_config(**KL)
    actor, reference, _ = engines(config)
    actor.companions = (reference,)
    before = weights(reference)
    assert actor.sleep() > sum(tensor.nbytes for tensor in before.values())
    assert all(not parameter.numel() for parameter in reference.model.parameters())
    actor.wake()
    assert equal(weights(reference), before)


@pytest.mark.parametrize("moving", [{"reset_every_steps": 2}, {"ema": 0.9}])
def test_off_the_device_between_its_uses_it_is_the_same(
    make_config: MakeConfig, tmp_path: Path, moving: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where a run refuses it, its weights go to a file: the calls are those on a GPU."""
    monkeypatch.setattr(
        "asyncrl.devices.sleeping.free_caches", lambda device: None
    )  # a second, for all that tests left
    found: list[tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = []
    for offload in (False, True):
        config = make_config(**KL, reference={"offload": offload, **moving})
        actor, reference = (
            TorchEngine(config.model_settings, config.learner.optim, 1),
            Reference(config.reference_settings, config.reference),
        )
        actor.prepare()
        actor.companions = (reference,)
        reference.prepare()
        if offload:
            with pytest.raises(UserError, match="is the CPU here"):
                reference.check_fits(actor, compares_distributions=config.algorithm.kl_estimator == "full")
        step, batch = (
            LearnerStep(Roles(actor, own_reference=reference), config.step_settings),
            made_up_batch(config, PromptProcessor(config.model)),
        )
        metrics = [step(batch, version) for version in range(2)]
        actor.sleep()
        actor.wake()
        metrics.append(step(batch, 2))
        assert offload == all(not parameter.numel() for parameter in reference.model.parameters())
        folder = tmp_path / str(offload)
        folder.mkdir()
        reference.files(copies=False)(folder)
        again = Reference(config.reference_settings, config.reference)
        again.prepare()
        again.load(folder)
        with reference.on_device(), again.on_device():
            assert equal(weights(again), weights(reference))
            found.append((metrics, weights(reference)))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("where", "estimator"), [("loss", "k3_unbiased"), ("loss", "full"), ("reward", "k1"), ("reward", "full")]
)
def test_micro_batching_changes_nothing(make_config: MakeConfig, where: str, estimator: str) -> None:
    """And the reference is the model without its adapters, or a frozen copy of it: the same numbers."""
    found: list[tuple[dict[str, float], torch.Tensor]] = []
    for budget, path in ((72, ""), (4096, ""), (4096, "a copy")):
        algorithm = {f"kl_{where}_coef": 0.5, "kl_estimator": estimator, "adv_estimator": "reinforce"}
        sections: dict[str, Any] = {**KL, "algorithm": algorithm, "batch": {"tokens_per_microbatch": budget}}
        config = lora_config(make_config, {}, **sections)
        if path:
            config = config.model_copy(
                update={"reference": config.reference.model_copy(update={"path": config.model.path})}
            )
        actor = KeepGradients(config.model_settings, config.learner.optim, 1)
        actor.prepare()
        load_published(actor.unwrap_model(), made_up_adapter(config, 1).items())
        reference = Reference(config.reference_settings, config.reference) if config.reference_model else None
        if reference:
            reference.prepare()
        batch = made_up_batch(config, PromptProcessor(config.model))
        metrics = LearnerStep(Roles(actor, own_reference=reference), config.step_settings)(batch, 3)
        found.append((metrics, torch.cat([g.flatten() for g in actor.gradients.values()])))
    assert abs(found[0][0]["reference_kl"]) > 0.01, "made-up tokens: k1 may be negative"
    for metrics, gradient in found[1:]:
        assert metrics["reference_kl"] == pytest.approx(found[0][0]["reference_kl"], rel=1e-5)
        assert metrics["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-5, abs=1e-6)
        assert (gradient - found[0][1]).norm() / found[0][1].norm() < 1e-4


def test_kl_in_the_reward_pulls_back_what_has_no_score(make_config: MakeConfig) -> None:
    """With equal scores the penalty alone makes advantages, and none where the policy is the reference still."""
    config = make_config(**KL | {"algorithm": {"kl_reward_coef": 0.5, "adv_estimator": "reinforce", "gamma": 1.0}})
    actor, reference, batch = engines(config, KeepGradients)
    batch.scores[:] = torch.where(batch.scores.isnan(), batch.scores, 0.0)
    step = LearnerStep(Roles(actor, own_reference=reference), config.step_settings)
    assert step(batch, 3)["grad_norm"] == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(1.1)
    metrics = step(batch, 3)
    assert metrics["kl_coef"] == 0.5
    assert metrics["grad_norm"] > 1e-2


REFUSED = {
    "nothing looks at the reference policy": {"reference": {"ema": 0.9}},
    "the optimiser is reset with the reference, which never is": {"reference": {"reset_optimizer": True}},
    "a reference that follows the policy needs no reset": {"reference": {"ema": 0.9, "reset_every_steps": 5}},
    "learner.device is cpu": {
        "reference": {"offload": True},
        "algorithm": {"kl_loss_coef": 0.1},
        "learner": {"device": "cpu"},
    },
    "full looks at it in every micro-batch": {
        "reference": {"offload": True},
        "algorithm": {"kl_loss_coef": 0.1, "kl_estimator": "full"},
    },
    "it is the model without its adapters": {
        "reference": {"offload": True},
        "algorithm": {"kl_loss_coef": 0.1},
        "model": {"lora": {"rank": 2}, "freeze_vision_tower": True},
    },
    "only adapters are trained": {
        "reference": {"reset_every_steps": 5},
        "algorithm": {"kl_loss_coef": 0.1},
        "model": {"lora": {"rank": 2}, "freeze_vision_tower": True},
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_reference_that_could_not_do_as_told_is_refused(make_config: MakeConfig, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        make_config(**REFUSED[why])


def test_a_checkpoints_policy_keeps_the_reference_of_the_start(make_config: MakeConfig) -> None:
    config = make_config(**KL)
    resumed = config.with_policy(Path("checkpoint/model"))
    assert resumed.model.path == "checkpoint/model"
    assert resumed.reference_model == config.reference_model
    assert resumed.critic_model == config.critic_model
    assert config.with_policy(None) == config
