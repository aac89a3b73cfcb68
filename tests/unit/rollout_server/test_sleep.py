"""Sleep takes the weights off the device, and wake brings them back bit for bit. CPU; the same code serves GPUs."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.devices.sleeping import HostMemory, Sleeper, fixed_tokens
from asyncrl.errors import BadStateError
from asyncrl.models.published import published_tensors
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from protocol.messages import Sampling
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine

CPU = torch.device("cpu")


def odd_tensors() -> list[torch.Tensor]:
    """Every kind of memory that a model or an optimiser may have."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(64, 48, generator=generator)
    return [
        base,
        torch.randn(7, 5, generator=generator).t(),
        torch.randn(33, generator=generator).to(torch.bfloat16),
        torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(10, 12, generator=generator)[:, 3:7],
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.arange(11),
        torch.nn.Parameter(torch.full((3,), float("nan"))),
        torch.randn(5, generator=generator)[1:],
    ]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def test_sleep_waits_for_the_owners_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: waited.append(device))
    HostMemory(torch.device("cuda:1"), pinned=True).finish()
    assert waited == [torch.device("cuda:1")], "not for the current device, which may be another"


@pytest.mark.parametrize("store", ["file", "memory"])
def test_whatever_a_tensor_looks_like_it_comes_back_as_it_was(tmp_path: Path, store: str) -> None:
    memory = HostMemory(CPU, pinned=False, chunk_bytes=1000) if store == "memory" else None
    sleeper = Sleeper("the test", CPU, tmp_path, memory)
    tensors = odd_tensors()
    before = [(t.dtype, t.shape, bits(t)) for t in tensors]
    for _ in range(2):
        moved = sleeper.sleep([*tensors, tensors[0]])
        assert moved == sum(t[1].numel() * t[0].itemsize for t in before), "each once"
        assert all(t.numel() == 0 for t in tensors)
        assert sleeper.wake() == moved
        assert [(t.dtype, t.shape, bits(t)) for t in tensors] == before
    assert tensors[1].stride() == (1, 5), "the order in memory is kept where it is dense"
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_the_file_is_closed_with_its_owner(tmp_path: Path) -> None:
    sleeper = Sleeper("the test", CPU, tmp_path)
    sleeper.sleep([torch.ones(3)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del sleeper
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    memory = HostMemory(CPU, pinned=False)
    sleeper = Sleeper("the test", CPU, tmp_path, memory)
    sleeper.sleep([torch.ones(3), torch.ones(5, 2)])
    memory._chunks[0][64 + 17] ^= 4
    with pytest.raises(BadStateError, match=r"the test woke up damaged: tensor 2 of 2, torch\.float32\(5, 2\)"):
        sleeper.wake()


# --- the training engine ----------------------------------------------------------------------------


def trained(config: RunConfig, *, naps: bool) -> TorchEngine:
    """Two optimiser steps on made-up gradients, the last gradients still there."""
    torch.manual_seed(0)
    engine = TorchEngine(config.model_settings, config.learner.optim, 3)
    engine.prepare()
    for _ in range(3):
        for p in engine.model.parameters():
            p.grad = torch.randn(p.shape)
        if naps:
            engine.sleep()
            engine.wake()
        if engine.updates.schedule.last_epoch < 2:
            engine.optimizer_step()
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_with_naps_is_training_without_bit_for_bit(
    make_config: Callable[..., RunConfig], one_thread: None, dtype: str
) -> None:
    plain, napped = (trained(make_config(model={"dtype": dtype}), naps=naps) for naps in (False, True))
    for (name, one), (_, other) in zip(plain.model.named_parameters(), napped.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert torch.equal(one.grad, other.grad), name
    states = [engine.updates.optimizer.state_dict()["state"] for engine in (plain, napped)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())
    for one, other in zip(plain.updates.masters.stepped(), napped.updates.masters.stepped(), strict=True):
        assert torch.equal(one, other)
    asleep = 2 * sum(p.numel() for p in napped.model.parameters()) * 4  # moments
    asleep += sum(
        t.nbytes for t in [*napped.model.parameters(), *napped.model.buffers(), *napped.updates.masters.copies()]
    )
    assert napped.sleep() >= asleep, "masters and moments leave the device, too"


def test_tied_weights_and_the_optimisers_references_stay(make_config: Callable[..., RunConfig]) -> None:
    engine = trained(make_config(), naps=False)
    model = engine.model
    model.lm_head.weight = model.get_input_embeddings().weight
    held = {id(p) for group in engine.updates.optimizer.param_groups for p in group["params"]}
    engine.sleep()
    engine.wake()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert {id(p) for p in model.parameters()} <= held | {id(model.lm_head.weight)}
    before = model.lm_head.weight.detach().clone()
    model.get_input_embeddings().weight.grad = torch.ones_like(before)
    engine.optimizer_step()
    assert not torch.equal(before, model.lm_head.weight)


def test_asleep_the_training_engine_refuses_everything(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    engine = trained(make_config(), naps=False)
    engine.sleep()
    calls: list[Callable[[], Any]] = [
        engine.sleep,
        engine.unwrap_model,
        engine.optimizer_step,
        engine.published_state,
        lambda: engine.forward(None),  # type: ignore[arg-type]
        lambda: engine.files(copies=False)(tmp_path),
    ]
    for call in calls:
        with pytest.raises(BadStateError, match="the training engine is asleep"):
            call()


def test_a_training_engine_that_says_something_else_after_waking_stops(make_config: Callable[..., RunConfig]) -> None:
    engine = trained(make_config(), naps=False)
    engine.sleep()
    engine._before = engine._before + 0.25
    with pytest.raises(BadStateError, match=r"the log-prob of fixed token \d+ was -?\d+\.\d+ and is -?\d+\.\d+"):
        engine.wake()


# --- the hf engine ------------------------------------------------------------------------------------


async def started(config: RunConfig) -> HFEngine:
    engine = HFEngine(config, PromptProcessor(config.model))
    await engine.start()
    return engine


async def sample(engine: HFEngine, request: GenerationRequest) -> list[list[int]]:
    completions: list[Completion] = [completion async for completion in engine.generate([request])]
    return [c.token_ids.tolist() for c in sorted(completions, key=lambda c: c.index)]


@pytest.fixture
def request_(make_config: Callable[..., RunConfig]) -> GenerationRequest:
    processor = PromptProcessor(make_config().model)
    stop = processor.tokenizer.eos_token_id
    sampling = Sampling(max_new_tokens=12, stop_token_ids=(stop,), banned_token_ids=processor.placeholder_ids)
    return GenerationRequest(1, EncodedPrompt.of_text(fixed_tokens(300, processor.placeholder_ids)), 3, 7, sampling)


@pytest.mark.parametrize("level", [1, 2])
def test_the_hf_engine_samples_the_same_after_a_nap(
    make_config: Callable[..., RunConfig], request_: GenerationRequest, level: int, one_thread: None
) -> None:
    config = make_config(rollout={"sleep_level": level})

    async def scenario() -> None:
        engine = await started(config)
        weights = [(name, tensor.clone()) for name, tensor in published_tensors(engine._model)]
        before = await sample(engine, request_)
        await engine.sleep()
        assert all(p.numel() == 0 for p in engine._model.parameters())
        assert engine.usage.sleep_bytes >= sum(t.nbytes for _, t in weights)
        with pytest.raises(BadStateError, match="the hf engine is asleep"):
            await engine.update_weights(1, weights)
        waiting = asyncio.create_task(sample(engine, request_))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "what comes while it sleeps waits"
        await engine.wake()
        if level == 2:
            await asyncio.sleep(0.1)
            assert not waiting.done(), "without weights nothing is sampled"
            await engine.update_weights(1, weights)
        assert await waiting == before
        assert await sample(engine, request_) == before
        await engine.close()

    asyncio.run(scenario())


def test_level_2_notices_weights_that_did_not_arrive_whole(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = await started(make_config(rollout={"sleep_level": 2}))
        weights = [(name, tensor.clone()) for name, tensor in published_tensors(engine._model)]
        await engine.sleep()
        await engine.wake()

        def load(model: torch.nn.Module, tensors: Any) -> None:
            own = dict(published_tensors(model))
            for number, (name, tensor) in enumerate(tensors):
                own[name].copy_(tensor * 2 if number == 3 else tensor)

        monkeypatch.setattr("rollout_server.engines.hf.engine.load_published", load)
        with pytest.raises(BadStateError, match=r"1 of \d+ tensors are not those that were published, such as model"):
            await engine.update_weights(1, weights)
        await engine.close()

    asyncio.run(scenario())
