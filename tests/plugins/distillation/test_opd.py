"""On-policy distillation: the credit is the gradient of the KL to the teacher."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.algorithms.trajectories import Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from asyncrl.errors import UserError
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.distillation.advantages import opd
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(**settings: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"adv_estimator": "opd", "opd": settings})


def test_the_mean_policy_gradient_is_that_of_the_kl_to_the_teacher() -> None:
    """Over all tokens of a vocabulary, each weighed by its probability, in float64 to 1e-6."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    ours, theirs = student.log_softmax(0), teacher.log_softmax(0)
    (exact,) = torch.autograd.grad((ours.exp() * (ours - theirs)).sum(), student, retain_graph=True)
    everywhere = torch.arange(50)
    t = Trajectories(
        scores=torch.zeros(50),
        group=torch.zeros(50, dtype=torch.long),
        row=everywhere,
        behaviour_logprobs=ours.detach(),
        proximal_logprobs=ours.detach(),
        reference_logprobs=theirs,
    )
    credit = opd(t, config_of()).advantages
    assert credit.tolist() == pytest.approx((theirs - ours).tolist(), abs=1e-12)
    (found,) = torch.autograd.grad(-(ours.exp().detach() * credit * ours).sum(), student)
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-6)


def test_weights_mix_the_teacher_with_rewards_and_one_token_is_bounded() -> None:
    t = Trajectories(
        scores=torch.tensor([1.0, 0.0]),
        group=torch.tensor([0, 0]),
        row=torch.tensor([0, 0, 1]),
        behaviour_logprobs=torch.zeros(3),
        proximal_logprobs=torch.tensor([-1.0, -2.0, -0.5]),
        reference_logprobs=torch.tensor([-0.5, -40.0, -0.5]),
    )
    assert opd(t, config_of()).advantages.tolist() == [0.5, -10.0, 0.0]
    mixed = opd(t, config_of(teacher_weight=2.0, reward_weight=0.1)).advantages
    grpo = 0.5 / (0.5**0.5 + 1e-6)
    assert mixed.tolist() == pytest.approx([1.0 + 0.1 * grpo, -20.0 + 0.1 * grpo, -0.1 * grpo], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the student would be its own teacher. Set reference.path"),
        (["reference.path=elsewhere", "algorithm.kl_estimator=full"], "algorithm.kl_estimator is full"),
        (["reference.path=elsewhere", "reference.ema=0.99"], "the reference moves"),
    ],
)
def test_what_is_no_distillation_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(GRPO, ["opd", *words])


def test_a_teacher_with_another_tokenizer_is_refused_by_name(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    told = json.loads((tiny_model / "tokenizer.json").read_text())
    told["added_tokens"][0]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ValidationError, match="other' has other ids"):
        make_config(algorithm={"adv_estimator": "opd"}, reference={"path": str(other)})


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=str)
def test_steps_lead_to_the_teacher(
    make_config: Callable[..., RunConfig], tmp_path: Path, model: dict[str, Any]
) -> None:
    """A wider teacher, which sees the same images. Tokens count as sampled by the step's policy."""
    teacher = make_tiny_model(tmp_path / "teacher", intermediate=256)
    config = make_config(
        model=model,
        algorithm={"adv_estimator": "opd"},
        reference={"path": str(teacher)},
        learner={"optim": {"lr": 3e-3, "weight_decay": 0.0}},
    )
    actor = TorchEngine(config.model_settings, config.learner.optim, 20)
    reference = Reference(config.reference_settings, config.reference)
    for engine in (actor, reference):
        engine.prepare()
    batch = made_up_batch(config, PromptProcessor(config.model))
    roles, distances = Roles(actor, own_reference=reference), []
    step = LearnerStep(roles, config.step_settings)
    for version in range(6):
        scored = roles.score(batch, ["proximal_logprobs", "reference_logprobs"], 512)
        assert scored.proximal_logprobs is not None
        assert scored.reference_logprobs is not None
        distances.append(float((scored.proximal_logprobs - scored.reference_logprobs).square().mean()))
        behaviour = batch.behaviour_logprobs.index_put((batch.trained.flat,), scored.proximal_logprobs)
        metrics = step(replace(batch, behaviour_logprobs=behaviour), version)
        kl = float((scored.proximal_logprobs - scored.reference_logprobs).mean())
        assert metrics["reference_kl"] == pytest.approx(kl, rel=1e-4)
    assert distances[-1] < 0.8 * distances[0]
