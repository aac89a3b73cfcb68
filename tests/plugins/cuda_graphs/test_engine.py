"""The `hf` engine with captured steps: its choice at the start, updates and sleep. A CPU's steps are recorded."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from asyncrl.models.small_copy import family_of
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.cuda_graphs import choice
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.slots import SlotLayer
from rollout_server.engines.base import Completion
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.decode_check import decoding_problem
from rollout_server.engines.hf.engine import HFEngine
from tests.plugins.cuda_graphs.recorded_steps import RecordedCapture
from tests.rigs.policies import (
    LENGTHS,
    MakeConfig,
    complete_all,
    gaps,
    initial_weights,
    moved,
    prompts,
    request_for,
    running_engine,
    sample_with_updates,
)

__all__ = ["prompts"]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[RecordedCapture]:
    """Record steps on the CPU, as they are captured on a GPU."""
    made: list[RecordedCapture] = []

    def make(device: torch.device) -> RecordedCapture:
        made.append(RecordedCapture(device))
        return made[-1]

    monkeypatch.setitem(choice.CAPTURES, "cpu", make)
    return made


async def started(config: Any) -> HFEngine:
    engine = HFEngine(config, PromptProcessor(config.model))
    await engine.start()
    return engine


async def sampled(engine: HFEngine, config: Any, prompts: tuple[EncodedPrompt, ...]) -> list[Completion]:
    requests = [request_for(config, prompt, i, tokens=40 - 9 * i) for i, prompt in enumerate(prompts)]
    return sorted(await complete_all(engine, requests), key=lambda done: (done.request_id, done.index))


def assert_same(completions: list[Completion], expected: list[Completion]) -> None:
    assert len(completions) == len(expected) == 8
    for completion, same in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(completion.token_ids, same.token_ids)
        np.testing.assert_allclose(completion.logprobs, same.logprobs, rtol=0, atol=1e-5)


def test_the_engine_samples_the_same_with_graphs_and_says_so(
    make_config: MakeConfig,
    prompts: tuple[EncodedPrompt, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config()

    async def scenario() -> list[Completion]:
        engine = await started(config)
        try:
            return await sampled(engine, config, prompts)
        finally:
            await engine.close()

    with caplog.at_level("INFO"):
        expected = asyncio.run(asyncio.wait_for(scenario(), 60))
        assert "CUDA graphs" not in caplog.text, "a CPU has none"
        capture = RecordedCapture()
        monkeypatch.setitem(choice.CAPTURES, "cpu", lambda device: capture)
        assert_same(asyncio.run(asyncio.wait_for(scenario(), 60)), expected)
    assert "the hf engine decodes with CUDA graphs" in caplog.text
    assert capture.replays > 10


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_tokens_match_the_policy_that_they_are_stamped_with(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], captures: list[RecordedCapture], mode: str
) -> None:
    config = make_config(rollout={"weight_update": mode})
    base = initial_weights(config)
    policies = [base, moved(base, 1), moved(base, 2)]
    requests, done = sample_with_updates(config, prompts, policies, LENGTHS)
    assert max(len(np.unique(c.versions)) for c in done) >= 2
    for completion in done:
        gap = gaps(config, policies, requests[completion.request_id], completion)
        is_mixed = completion.versions > completion.versions[0] if mode == "keep" else np.zeros(len(gap), bool)
        assert gap[~is_mixed].max() < 1e-5, (completion.request_id, completion.versions)
    assert sum(capture.replays for capture in captures) > 20


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_neither_graphs_nor_their_memory(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], captures: list[RecordedCapture], level: int
) -> None:
    """Weights come back at other addresses."""
    config = make_config(rollout={"sleep_level": level})
    base, before = initial_weights(config), list[RecordedCapture]()

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        engine = await started(config)
        await engine.update_weights(0, base.items())
        first = await sampled(engine, config, prompts)
        batch = engine._decoding.batch
        assert isinstance(batch, GraphedBatch)
        assert batch._graphs._steps
        memory = [weakref.ref(tensor.memory) for tensor in batch._slots._tensors()]
        assert memory
        del batch
        await engine.sleep()
        before.extend(captures)
        assert [seen for seen in memory if seen() is not None] == []
        await engine.wake()
        await engine.update_weights(1, base.items())
        second = await sampled(engine, config, prompts)
        await engine.close()
        return first, second

    first, second = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert_same(second, first)
    assert sum(capture.replays for capture in captures[len(before) :]) > 10, "of graphs that were captured anew"


def test_a_failed_step_gives_its_requests_back_and_the_engine_goes_on(
    make_config: MakeConfig,
    prompts: tuple[EncodedPrompt, ...],
    captures: list[RecordedCapture],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config()
    failures, compute = iter([RuntimeError("out of memory")]), GraphedBatch._compute

    def fail_once(self: GraphedBatch, *arguments: Any) -> torch.Tensor:
        for failure in failures:
            raise failure
        return compute(self, *arguments)

    monkeypatch.setattr(GraphedBatch, "_compute", fail_once)

    async def scenario() -> None:
        async with running_engine(config, prompts[0], tokens=5) as (engine, task):
            with pytest.raises(RuntimeError, match="out of memory"):
                await task
            assert len(await complete_all(engine, [request_for(config, prompts[0], 0, tokens=5)])) == 2
            assert isinstance(engine._decoding.batch, GraphedBatch)

    asyncio.run(asyncio.wait_for(scenario(), 60))


REASONS = {
    "enforce_eager": "rollout.engine_args.enforce_eager is true",
    "traces": r"a replayed step records no traces of tokens (experts)",
    "attention": "the model's attention is eager, and steps were captured with torch's alone",
    "family": "log-probs of its family",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_log_says_why_there_are_no_graphs(
    name: str,
    make_config: MakeConfig,
    captures: list[RecordedCapture],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(rollout={"engine_args": {"enforce_eager": True} if name == "enforce_eager" else {}})
    model: Any = torch.nn.Module()
    model.config = AutoConfig.from_pretrained(config.model.path)
    model.config.text_config._attn_implementation = "eager" if name == "attention" else choice.GROUPED_ATTENTION
    if name == "family":
        monkeypatch.setattr(choice, "family_problem", lambda _: "log-probs of its family differ")
    recorders = {"experts": lambda: torch.zeros(0)} if name == "traces" else {}
    with caplog.at_level("INFO"):
        assert choice.graphed_batches(config, model, (), torch.device("cpu"), recorders) is None
    assert f"the hf engine decodes without CUDA graphs: {REASONS[name]}" in caplog.text


def test_after_a_failure_batches_are_those_of_the_core(
    make_config: MakeConfig, captures: list[RecordedCapture]
) -> None:
    config = make_config()
    model: Any = torch.nn.Module()
    model.config = AutoConfig.from_pretrained(config.model.path)
    model.config.text_config._attn_implementation = choice.GROUPED_ATTENTION
    make = choice.graphed_batches(config, model, (), torch.device("cpu"), {})
    assert make is not None
    batch = make()
    assert isinstance(batch, GraphedBatch)
    batch._graphs.failure = "a capture failed"
    assert type(make()) is DecodeBatch


def test_a_family_whose_steps_would_be_wrong_is_found_at_the_start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(make_config().model)
    assert decoding_problem(family, groups_queries=True, kind=partial(choice.uncaptured)) == ""
    monkeypatch.setattr(SlotLayer, "get_seq_length", lambda self: 0)
    problem = decoding_problem(family, groups_queries=True, kind=partial(choice.uncaptured))
    assert problem.startswith("log-probs of its family qwen2_vl in a batch differ by")
