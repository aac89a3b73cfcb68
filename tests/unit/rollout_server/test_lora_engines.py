"""Adapters in both engines: what is trained, the reference policy, and versions that are swapped under sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.trajectories import Credit
from asyncrl.errors import UserError
from asyncrl.models.published import load_published
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from learner.loop.logprob_parity import compare
from learner.training.engine import TorchEngine
from learner.training.packing import build_micro_batch, plan_micro_batches
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.adapters import MakeConfig, lora_config, made_up_adapter, merged
from tests.rigs.alignment_rig import answer, learner_engine, parity_tickets
from tests.rigs.made_up_batch import KeepGradients, made_up_batch
from tests.rigs.policies import LENGTHS, gaps, prompts, sample_with_updates

__all__ = ["prompts"]
pytestmark = pytest.mark.usefixtures("one_thread")
TOWER = {"vision_tower": True}
WHOLE = {"modules_to_save": ["connector"]}


# --- training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [{}, TOWER, WHOLE], ids=["language model", "vision tower, too", "whole connector"])
def test_only_adapters_get_a_gradient_and_move(make_config: MakeConfig, lora: dict[str, Any]) -> None:
    config = lora_config(make_config, lora, data={"max_prompt_length": 64})
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    before = {name: p.detach().clone() for name, p in engine.unwrap_model().named_parameters()}
    LearnerStep(Roles(engine), config.step_settings)(made_up_batch(config, PromptProcessor(config.model)), 3)
    moved = {n for n, p in engine.unwrap_model().named_parameters() if not torch.equal(p, before[n])}
    whole = {name for name in before if ".merger.modules_to_save." in name}
    assert moved == {name for name in before if ".lora_B." in name} | whole, "A has no gradient while B is 0"
    assert bool(whole) == (lora is WHOLE)
    assert any(".visual." in name for name in moved) == bool(lora)
    assert [name for name, _ in engine.published_state()] == list(made_up_adapter(config, 0))


def test_the_same_seed_begins_with_the_same_adapter(make_config: MakeConfig) -> None:
    def initial(seed: int) -> dict[str, torch.Tensor]:
        config = lora_config(make_config, trainer={"seed": seed})
        engine = TorchEngine(config.model_settings, config.learner.optim, 1)
        torch.rand(seed)
        engine.prepare()
        return dict(engine.published_state())

    one, again, other = initial(1), initial(1), initial(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert all(not tensor.any() for name, tensor in one.items() if "lora_B" in name), "it changes nothing yet"


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_micro_batching_changes_nothing(make_config: MakeConfig, kl: float) -> None:
    results = []
    for budget in (72, 4096):
        config = lora_config(
            make_config,
            data={"max_prompt_length": 64},
            batch={"tokens_per_microbatch": budget},
            algorithm={"kl_loss_coef": kl},
        )
        engine = KeepGradients(config.model_settings, config.learner.optim, 1)
        engine.prepare()
        load_published(engine.unwrap_model(), made_up_adapter(config, 1).items())
        metrics = LearnerStep(Roles(engine), config.step_settings)(
            made_up_batch(config, PromptProcessor(config.model)), 3
        )
        results.append((metrics, engine.gradients))
    (many_metrics, many), (metrics, one) = results
    # Terms of about 1 that cancel to 0.002: fp32 rounds the former, so the error is theirs.
    assert many_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-6)
    assert ("reference_kl" in metrics) == bool(kl)
    assert {name for name, g in one.items() if g.any()} == {name for name in one if ".lora_" in name}
    norm = torch.stack([g.norm() for g in one.values()]).norm()
    assert torch.stack([(many[n] - g).norm() for n, g in one.items()]).norm() / norm < 1e-5


# --- the reference policy -------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [{}, WHOLE], ids=["language model", "whole connector"])
def test_the_reference_is_the_base_model(make_config: MakeConfig, lora: dict[str, Any]) -> None:
    config, plain = lora_config(make_config, lora), make_config()
    batch = made_up_batch(config, PromptProcessor(config.model))
    engines = []
    for each in (config, plain):
        engine = TorchEngine(each.model_settings, each.learner.optim, 1)
        engine.prepare()
        engines.append(engine)
    adapted, base = engines
    load_published(adapted.unwrap_model(), made_up_adapter(config, 1).items())
    part = plan_micro_batches(batch.train_groups, 4096)[0]
    micro_batch = build_micro_batch(base.unwrap_model(), part, base.device)
    with adapted.reference():
        reference = adapted.forward(micro_batch).logprobs
    assert not reference.requires_grad
    assert torch.equal(reference, base.forward(micro_batch).logprobs)
    assert (adapted.forward(micro_batch).logprobs - reference).abs().max() > 0.1, "and on again afterwards"
    assert adapted.forward(micro_batch).logprobs.requires_grad
    with pytest.raises(UserError, match=r"Set model.lora.rank=16"), base.reference():
        pass


def test_the_kl_term_is_its_coefficient_times_k3(make_config: MakeConfig) -> None:
    """With zero advantages nothing else is in the loss; far from the reference the step goes back to it."""
    metrics = {}
    for coefficient in (0.0, 0.5):
        config = lora_config(make_config, algorithm={"kl_loss_coef": coefficient})
        engine = KeepGradients(config.model_settings, config.learner.optim, 1)
        engine.prepare()
        load_published(engine.unwrap_model(), made_up_adapter(config, 1).items())
        batch = made_up_batch(config, PromptProcessor(config.model))
        step = LearnerStep(Roles(engine), config.step_settings)
        step.estimator = lambda trajectories, algorithm: Credit(torch.zeros(len(trajectories.row)))
        metrics[coefficient] = step(batch, 3), engine.gradients
    (without, no_gradient), (with_kl, gradient) = metrics[0.0], metrics[0.5]
    assert "reference_kl" not in without
    assert without["loss"] == 0
    assert not any(g.any() for g in no_gradient.values())
    assert with_kl["reference_kl"] > 0.01
    assert with_kl["loss"] == pytest.approx(0.5 * with_kl["reference_kl"], rel=1e-4)
    assert any(g.any() for g in gradient.values())


# --- the engine that samples -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "dtype", "largest"),
    [({}, "float32", 1e-5), (TOWER, "float32", 1e-5), (WHOLE, "float32", 1e-5), (WHOLE, "bfloat16", 0.2)],
    ids=["language model", "vision tower, too", "whole connector", "bf16 weights"],
)
def test_learner_and_engine_agree_on_an_adapter(
    make_config: MakeConfig, lora: dict[str, Any], dtype: str, largest: float
) -> None:
    config = lora_config(make_config, lora, rollout={"temperature": 0.8})
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    adapter, processor = made_up_adapter(config, 1), PromptProcessor(config.model)

    class Adapted(HFEngine):
        async def start(self) -> None:
            await super().start()
            await self.update_weights(1, adapter.items())

    received = answer(Adapted(config, processor), processor, parity_tickets(config, processor))
    learner = learner_engine(config)
    load_published(learner.unwrap_model(), adapter.items())
    assert compare(learner, processor, received, 512).largest < largest


def test_a_hot_swap_never_mixes_adapters_under_one_version(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    """Every token's log-prob is that of the adapter whose version it carries, and of no other."""
    config = lora_config(make_config, TOWER, rollout={"weight_update": "recompute"})
    adapters = [made_up_adapter(config, seed) for seed in (0, 1, 2)]
    requests, done = sample_with_updates(config, prompts, adapters, LENGTHS)
    policies = [merged(config, adapter) for adapter in adapters]
    assert max(len(np.unique(c.versions)) for c in done) >= 2
    plain = make_config()
    for completion in done:
        request = requests[completion.request_id]
        assert (np.diff(completion.versions) >= 0).all()
        assert gaps(plain, policies, request, completion).max() < 1e-4
        swapped = replace(completion, versions=(completion.versions + 1) % 3)
        assert gaps(plain, policies, request, swapped).mean() > 0.1
