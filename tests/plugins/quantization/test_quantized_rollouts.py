"""Rollouts with weights of 8 bits: the rounding, the policy that samples with them, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl.data.prompts import PromptRenderer
from asyncrl.models.loading import load_model
from asyncrl.models.lora import write_adapter_folder
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.quantization.grid import on_grid, quantizable, rounded
from learner.loop.policy_export import finish_export
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.adapters import made_up_adapter, merged, spec_of
from tests.rigs.policies import (
    CPU,
    LENGTHS,
    Weights,
    complete_all,
    gaps,
    initial_weights,
    moved,
    prompts,
    request_for,
    sample_with_updates,
)

__all__ = ["prompts"]
MakeConfig = Callable[..., RunConfig]
FP32 = 1e-4

# --- the grid -------------------------------------------------------------------------------


def test_each_channel_is_rounded_by_a_scale_of_its_own() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.0031], [254.0, -1.1, 0.0], [0.0, 0.0, 0.0]])
    assert on_grid(weight, "int8").numpy() == pytest.approx(
        torch.tensor([[1.27, -0.63, 0.0], [254.0, -2.0, 0.0], [0.0, 0.0, 0.0]]).numpy()
    )
    # Of 4 bits: 16 to 32 in steps of 2, ties to the even one; 0.25 to 0.5 in steps of 1/32; none below 1/1024.
    weight = torch.tensor([[448.0, 17.0, -0.3, 0.0003], [-4.48, 0.17, 0.003, 0.0]])
    expected = torch.tensor([[448.0, 16.0, -0.3125, 0.0], [-4.48, 0.16, 0.003125, 0.0]])
    assert on_grid(weight, "fp8").numpy() == pytest.approx(expected.numpy())
    assert on_grid(weight.bfloat16(), "fp8").dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rounding_is_no_further_than_half_a_step_and_has_no_effect_twice(kind: str) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    near = on_grid(weight, kind)
    largest = weight.abs().amax(-1, keepdim=True)
    half = largest / 254 if kind == "int8" else (weight.abs() / 16).maximum(largest / 448 / 1024)
    assert ((near - weight).abs() <= half * (1 + 1e-5)).all()
    torch.testing.assert_close(on_grid(near, kind), near, rtol=1e-6, atol=0)


def test_linear_layers_of_the_language_model_are_quantised_and_nothing_else(make_config: MakeConfig) -> None:
    model: Any = load_model(make_config().model, device=CPU)
    names = quantizable(model)
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and "language_model" in name}
    assert names == matrices - {"model.language_model.embed_tokens.weight"}
    assert len(names) == 7 * model.config.get_text_config().num_hidden_layers


# --- the hf engine --------------------------------------------------------------------------


def as_rounded(config: RunConfig, weights: Weights) -> Weights:
    names = quantizable(load_model(config.model, device=CPU))
    return dict(rounded(weights.items(), names, config.rollout.quantization))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_token_is_of_the_rounded_weights_of_its_version(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], kind: str
) -> None:
    """Versions whose largest magnitudes differ, so that a scale of an earlier one would be seen."""
    config = make_config(rollout={"quantization": kind, "weight_update": "recompute"})
    first = initial_weights(config)
    policies = [first, moved(first, 1, by=1.0), {name: 0.5 * w for name, w in moved(first, 2).items()}]
    requests, done = sample_with_updates(config, prompts, policies, LENGTHS)
    on_grids = [as_rounded(config, policy) for policy in policies]
    assert {v for c in done for v in c.versions.tolist()} == {0, 1, 2}
    for completion in done:
        request = requests[completion.request_id]
        assert gaps(config, on_grids, request, completion).max() < FP32
        assert gaps(config, policies, request, completion).max() > 10 * FP32


async def logprobs_of(engine: HFEngine, config: RunConfig, prompt: EncodedPrompt) -> list[list[float]]:
    done = await complete_all(engine, [request_for(config, prompt, 0, tokens=20)])
    return [completion.logprobs.tolist() for completion in sorted(done, key=lambda c: c.index)]


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_with_the_same_policy(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], level: int
) -> None:
    config = make_config(rollout={"quantization": "int8", "sleep_level": level})

    async def scenario() -> None:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        before = await logprobs_of(engine, config, prompts[0])
        await engine.sleep()
        await engine.wake()
        if level == 2:
            await engine.update_weights(1, initial_weights(config).items())
        assert await logprobs_of(engine, config, prompts[0]) == before
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_base_of_an_adapter_is_rounded_and_the_adapter_is_not(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    config = make_config(model={"lora": {"rank": 4}}, rollout={"quantization": "int8"})
    whole = make_config(rollout={"quantization": "int8"})
    base = initial_weights(whole)
    change = made_up_adapter(config, 1)
    both = merged(config, change)
    near = as_rounded(whole, base)
    policy = {name: near[name] + (both[name] - base[name]) for name in base}

    async def scenario() -> None:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        await engine.update_weights(1, change.items())
        request = request_for(config, prompts[0], 0, tokens=20)
        for completion in await complete_all(engine, [request]):
            assert gaps(whole, {1: policy}, request, completion).max() < FP32
            assert gaps(whole, {1: both}, request, completion).max() > 10 * FP32
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


# --- rules ----------------------------------------------------------------------------------

NOT_THE_LEARNERS = "the policy that samples is not the learner's"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({}, None),
        ({"rollout": {"engine": "scripted"}, "alignment": {"rows": 0}}, "scripted, which has no model"),
        ({"rollout": {"quantization": "fp4"}}, r"rollout\.quantization is 'fp4', and there are fp8, int8, nf4\."),
        (
            {"algorithm": {"correction": {"kind": "none"}}},
            rf"{NOT_THE_LEARNERS}.*kind is none. Set algorithm.correction.kind=token_tis",
        ),
        (
            {"algorithm": {"proximal": "behaviour", "correction": {"kind": "none"}}},
            rf"{NOT_THE_LEARNERS}.*proximal is behaviour, .* Set algorithm.proximal=recompute",
        ),
        ({"algorithm": {"proximal": "loglinear"}}, rf"{NOT_THE_LEARNERS}.*proximal is loglinear"),
        ({"algorithm": {"proximal": "target"}}, None),
        ({"algorithm": {"policy_loss": "dppo"}}, None),  # it weighs by the behaviour policy itself
    ],
)
def test_quantised_rollouts_need_an_engine_that_has_them_and_a_correction(
    make_config: MakeConfig, sections: dict[str, dict[str, Any]], problem: str | None
) -> None:
    sections = {**sections, "rollout": {"quantization": "fp8", **sections.get("rollout", {})}}
    if problem is None:
        assert make_config(**sections).rollout.quantization == "fp8"
    else:
        with pytest.raises(ValidationError, match=problem):
            make_config(**sections)


# --- the end product --------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rank"), [("fp8", 0), ("int8", 4)])
def test_an_export_is_compared_with_the_rounded_policy_that_sampled(
    make_config: MakeConfig, tmp_path: Path, kind: str, rank: int
) -> None:
    """Nobody rounds an export: it is another policy than the one whose rewards were seen, also with an adapter."""
    config, folder = make_config(model={"lora": {"rank": rank}}), tmp_path / "export"
    if rank:
        write_adapter_folder(folder, spec_of(config), made_up_adapter(config, 1).items(), base_path=config.model.path)
    else:
        shutil.copytree(config.model.path, folder)
    processor = PromptProcessor(config.model)
    shown = [PromptRenderer(config.data).render({"prompt": f"What is {i}?", "answer": "1"}, f"{i}") for i in range(8)]
    record = finish_export(config.model, kind, processor, lambda: shown, folder)
    assert record.form == ("adapter" if rank else "model")
    assert record.tokens > 200
    assert record.logprob_gap is not None
    assert 1e-4 < record.logprob_gap < 1
    line = replace(record, logprob_gap=0.02).describe()
    assert f"DIFFERS FROM THE POLICY. It was sampled with {kind} weights: serve it with such" in line
    assert "DIFFERS" not in replace(record, logprob_gap=0.009).describe()
    assert "DIFFERS" in replace(record, logprob_gap=float("nan")).describe()
