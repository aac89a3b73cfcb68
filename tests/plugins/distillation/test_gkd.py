"""Generalised knowledge distillation: the loss of a step is the divergence of whole distributions from a teacher's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from asyncrl.errors import UserError
from asyncrl.models import output_head
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.distillation.divergence import class_logprobs, generalised_jsd, likeliest
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import KeepGradients, made_up_batch
from tests.rigs.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model than the student, which sees the same images."""
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", intermediate=256)


def taught(make_config: MakeConfig, teacher: Path, *, gkd: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    algorithm = {"adv_estimator": "gkd", "gkd": gkd or {}, **sections.pop("algorithm", {})}
    return make_config(algorithm=algorithm, reference={"path": str(teacher)}, **sections)


def roles_of(config: RunConfig, engine: type[TorchEngine] = TorchEngine) -> Roles:
    actor = engine(config.model_settings, config.learner.optim, 20)
    reference = Reference(config.reference_settings, config.reference) if config.reference_model else None
    for role in filter(None, (actor, reference)):
        role.prepare()
    return Roles(actor, own_reference=reference)


def distributions(engine: TorchEngine, batch: Batch) -> torch.Tensor:
    """[N, V] log-probs before the batch's trained tokens."""
    packed = engine.pack(batch.train_groups)
    found = engine.head.distributions(engine.states(packed))
    return torch.zeros_like(found).index_copy(0, batch.places(packed.row, packed.column), found)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_and_its_gradient_are_those_of_whole_distributions(
    make_config: MakeConfig, teacher: Path, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches and in chunks of three tokens; a token's loss is its divergence, whatever its staleness."""
    settings = {"beta": beta, "top_k": 7, "teacher_weight": 2.0}
    sizes = {"data": {"max_prompt_length": 64}, "batch": {"tokens_per_microbatch": 72}}
    config = taught(make_config, teacher, gkd=settings, **sizes)
    roles = roles_of(config, KeepGradients)
    batch = made_up_batch(config, PromptProcessor(config.model))
    assert roles.own_reference is not None
    with torch.no_grad():
        theirs = distributions(roles.own_reference, batch)
    ours = distributions(roles.actor, batch)
    ids = likeliest(theirs, 7)
    expected = generalised_jsd(class_logprobs(ours, ids), class_logprobs(theirs, ids), beta)
    parameters = [p for p in roles.actor.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(2 * expected.mean(), parameters)
    monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", 3 * roles.actor.facts.vocabulary)
    metrics = LearnerStep(roles, config.step_settings)(batch, 3)
    assert metrics["loss"] == pytest.approx(2 * float(expected.detach().mean()), rel=1e-5)
    assert metrics["teacher/divergence"] == pytest.approx(float(expected.detach().mean()), rel=1e-5)
    others = 1 - theirs.gather(-1, ids).exp().sum(-1)
    assert metrics["teacher/mass_of_others"] == pytest.approx(float(others.mean()), rel=1e-4)
    assert isinstance(roles.actor, KeepGradients)
    names = {id(p): name for name, p in roles.actor.model.named_parameters()}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(roles.actor.gradients[names[id(parameter)]], gradient, atol=1e-6, rtol=1e-4)


def test_rewards_are_mixed_in_by_their_weight(make_config: MakeConfig, teacher: Path) -> None:
    """The gradient of both together is the sum of theirs."""
    found: list[dict[str, torch.Tensor]] = []
    batch = None
    for algorithm in (
        {"adv_estimator": "grpo"},
        {"adv_estimator": "gkd", "gkd": {"teacher_weight": 0.5}},
        {"adv_estimator": "gkd", "gkd": {"teacher_weight": 0.5, "reward_weight": 0.25}},
    ):
        reference = {"path": str(teacher)} if "gkd" in algorithm else {}
        config = make_config(algorithm=algorithm, reference=reference)
        batch = batch or made_up_batch(config, PromptProcessor(config.model))
        roles = roles_of(config, KeepGradients)
        LearnerStep(roles, config.step_settings)(batch, 2)
        assert isinstance(roles.actor, KeepGradients)
        found.append(roles.actor.gradients)
    rewards, alone, both = found
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, alone[name] + 0.25 * rewards[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=str)
def test_steps_lead_to_the_teacher(make_config: MakeConfig, teacher: Path, model: dict[str, Any]) -> None:
    """Two updates of each batch: the teacher scores it once, and each update compares the student as it is then."""
    config = taught(
        make_config,
        teacher,
        model=model,
        algorithm={"updates_per_batch": 2},
        batch={"tokens_per_microbatch": 4096},
        learner={"optim": {"lr": 3e-3, "weight_decay": 0.0}},
    )
    roles = roles_of(config)
    batch = made_up_batch(config, PromptProcessor(config.model))
    step = LearnerStep(roles, config.step_settings)
    assert roles.own_reference is not None
    passes: list[bool] = []
    roles.own_reference.model.base_model.register_forward_hook(lambda *_: passes.append(True))
    distances = [step(batch, version)["teacher/divergence"] for version in range(2, 8)]
    assert distances[-1] < 0.8 * distances[0]
    assert len(passes) == len(distances)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the student would be its own teacher. Set reference.path"),
        (["reference.path=elsewhere", "algorithm.kl_estimator=full", "algorithm.kl_loss_coef=0.1"], "estimator=k1"),
    ],
)
def test_what_is_no_distillation_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(GRPO, ["gkd", *words])
