"""Real graphs on a GPU: the tokens of steps without them. On the CPU steps are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import compute_in_full_float32
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.cuda_graphs import choice
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.graphs import Capture, CudaCapture
from rollout_server.engines.base import Completion
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.engine import HFEngine
from tests.plugins.cuda_graphs.recorded_steps import RecordedCapture
from tests.plugins.cuda_graphs.small_models import TEXT, graphed, largest_difference, requests, run, text_model
from tests.rigs.policies import MakeConfig, complete_all, prompts, request_for

__all__ = ["prompts"]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAKERS: dict[str, Callable[[], Capture]] = {
    "cpu": RecordedCapture,
    "cuda": lambda: CudaCapture(torch.device("cuda:0")),
}
SAME = 1e-3
"""Nats. On a GPU other numbers of rows and columns have other kernels."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TEXT)
def test_replayed_steps_sample_the_tokens_of_others(name: str, device: str, one_thread: None) -> None:
    compute_in_full_float32()
    first, second, third = requests(9, 30, 14, tokens=40)
    waves = [[first], [second], [third]]
    model = text_model(name, device)
    batches = DecodeBatch(model, (), model.device), graphed(model, None), graphed(model, MAKERS[device])
    plain, eager, captured = (run(batch, waves, batch.rebuild_cache) for batch in batches)
    graphs = batches[2]._graphs
    assert graphs.failure == ""
    assert any(step.is_checked for step in graphs._steps.values())
    assert largest_difference(captured, eager) <= SAME
    assert largest_difference(captured, plain) <= SAME


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_samples_with_graphs_and_sleeps_between(
    device: str,
    make_config: MakeConfig,
    prompts: tuple[EncodedPrompt, ...],
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    monkeypatch.setitem(choice.CAPTURES, "cpu", RecordedCapture)

    async def scenario(config: RunConfig) -> list[Completion]:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        done: list[Completion] = []
        for _ in range(2):
            given = [request_for(config, prompt, i, tokens=40 - 9 * i) for i, prompt in enumerate(prompts)]
            done += sorted(await complete_all(engine, given), key=lambda each: (each.request_id, each.index))
            batch = engine._decoding.batch
            if isinstance(batch, GraphedBatch):
                assert batch._graphs.failure == ""
                assert batch._graphs._steps
            del batch
            await engine.sleep()
            await engine.wake()
        await engine.close()
        return done

    found = []
    for eager in (True, False):
        config = make_config(rollout={"device": device, "engine_args": {"enforce_eager": eager}})
        found.append(asyncio.run(asyncio.wait_for(scenario(config), 120)))
    for completion, same in zip(*found, strict=True):
        np.testing.assert_array_equal(completion.token_ids, same.token_ids)
        np.testing.assert_allclose(completion.logprobs, same.logprobs, rtol=0, atol=SAME)
