"""New weights under running sequences: what each mode of `rollout.weight_update` does to their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import load_model
from asyncrl.models.published import load_published
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, EngineDied, FailedRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.policies import (
    CPU,
    LENGTHS,
    MakeConfig,
    complete_all,
    fresh_logits,
    gaps,
    initial_weights,
    moved,
    prompts,
    request_for,
    running_engine,
    sample_with_updates,
    until_running,
    updated_in_flight,
)

__all__ = ["prompts"]

# --- the decode batch: rebuilding a cache ---------------------------------------------------------------


def running_batch(config: RunConfig, prompts: Sequence[EncodedPrompt]) -> DecodeBatch:
    """Sequences of mixed prompts and mixed ages, one of them one token old."""
    model = load_model(config.model, device=CPU)
    batch = DecodeBatch(model, PromptProcessor(config.model).placeholder_ids, CPU)
    for number, prompt in enumerate(prompts):
        batch.join(batch.prefill([request_for(config, prompt, number, tokens=50)], version=0))
        if number < len(prompts) - 1:
            for _ in range(3 + number):
                batch.step(version=0)
    return batch


@pytest.mark.parametrize("tokens_per_forward", [8192, 24])
def test_logits_on_a_rebuilt_cache_equal_a_fresh_forward_pass(
    make_config: MakeConfig,
    prompts: tuple[EncodedPrompt, ...],
    monkeypatch: pytest.MonkeyPatch,
    tokens_per_forward: int,
) -> None:
    monkeypatch.setattr("rollout_server.engines.hf.decode_batch.REBUILD_TOKENS", tokens_per_forward)
    config = make_config()
    batch = running_batch(config, prompts)
    ages = {len(row.token_ids) for row in batch.rows}
    assert len(ages) == 4
    assert min(ages) == 1
    load_published(batch.model, moved(initial_weights(config), 1).items())
    pixels: list[int] = []
    forward = batch.model.model.visual.forward
    monkeypatch.setattr(batch.model.model.visual, "forward", lambda h, **k: pixels.append(len(h)) or forward(h, **k))
    batch.rebuild_cache()
    assert pixels == [sum(len(p.pixel_values) for p in prompts if p.pixel_values is not None)], "each image once"

    seen: list[torch.Tensor] = []
    sample = batch._sample

    def spy(logits: torch.Tensor, rows: Sequence[DecodeRow], version: int) -> None:
        seen.append(logits.clone())
        sample(logits, rows, version)

    monkeypatch.setattr(batch, "_sample", spy)
    for _ in range(3):
        batch.step(version=1)
        for row, logits in zip(batch.rows, seen[-1], strict=True):
            fresh = fresh_logits(batch.model, row.request.prompt, row.token_ids[:-1])[-1]
            assert (logits - fresh).abs().max() < 1e-5
            assert row.versions[-1] == 1
    assert batch._attention.shape[1] == max(int(row.sum()) for row in batch._attention), "no gap is left"


def test_a_decode_step_waits_for_the_device_once(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other look at a value on a GPU would leave it idle until the next kernels are there."""
    batch = running_batch(make_config(), prompts)
    forward, looks, copies = batch._forward, list[str](), list[int]()
    in_model = False

    def model_forward(*arguments: torch.Tensor) -> torch.Tensor:
        nonlocal in_model
        in_model = True  # transformers' own code
        try:
            return forward(*arguments)
        finally:
            in_model = False

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)

        def look(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if not in_model:
                looks.append(name)
            return plain(self, *arguments, **named)

        return look

    with monkeypatch.context() as patch:
        patch.setattr(batch, "_forward", model_forward)
        for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
            patch.setattr(torch.Tensor, name, counted(name))
        to_device = batch._to_device
        patch.setattr(batch, "_to_device", lambda table: copies.append(len(table)) or to_device(table))
        assert not batch.step(version=0), "a row that ends is one more look, at the padding"
    assert looks == ["tolist"]
    assert copies == [len(batch.rows)] * 2, "tokens and positions, then what sampling needs"


# --- the engine: updates while sequences run ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_tokens_match_the_policy_they_are_stamped_with_and_kept_caches_say_where_not(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], mode: str
) -> None:
    config = make_config(rollout={"weight_update": mode})
    base = initial_weights(config)
    policies = [base, moved(base, 1), moved(base, 2)]
    requests, done = sample_with_updates(config, prompts, policies, LENGTHS)
    assert max(len(np.unique(c.versions)) for c in done) >= 2
    for completion in done:
        assert len(completion.versions) == len(completion.token_ids) == LENGTHS[completion.request_id]
        assert (np.diff(completion.versions) >= 0).all()
        gap = gaps(config, policies, requests[completion.request_id], completion)
        is_mixed = completion.versions > completion.versions[0] if mode == "keep" else np.zeros(len(gap), bool)
        assert gap[~is_mixed].max() < 1e-5, (completion.request_id, completion.versions)
        if is_mixed.any():
            assert gap[is_mixed].max() > 1e-3, "no single policy explains tokens behind an older cache"


@pytest.mark.parametrize("kind", ["hf", "scripted"])
def test_drain_gives_each_sequence_one_version(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], kind: str
) -> None:
    script = {"mean_length": 40, "length_sigma": 1.0, "seconds_per_token": 0.0005} if kind == "scripted" else {}
    config = make_config(rollout={"weight_update": "drain", "engine": kind, "engine_args": script})
    base = initial_weights(config)

    async def scenario() -> list[Completion]:
        engine = create_engine(config, PromptProcessor(config.model))
        await engine.start()

        def sample(*numbers: int) -> asyncio.Task[list[Completion]]:
            stop = {"stop_token_ids": (1,)} if kind == "scripted" else {}
            requests = [request_for(config, prompts[i], i, tokens=40, **stop) for i in numbers]
            return asyncio.create_task(complete_all(engine, requests))

        running = sample(0, 1)
        await until_running(engine)
        update = asyncio.create_task(engine.update_weights(1, moved(base, 1).items()))
        await asyncio.sleep(0.002)
        late = sample(2)
        done = [*await running, *await late]
        await update
        assert engine.version == 1
        await engine.close()
        return done

    done = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(done) == 6
    for completion in done:
        assert (completion.versions == (1 if completion.request_id == 2 else 0)).all()


def test_draws_depend_on_seed_index_and_position_only(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    """Neither the company in the batch nor a weight update (here: to equal weights) changes a sequence."""
    config = make_config(rollout={"weight_update": "recompute"})
    base = initial_weights(config)
    tokens = (8, 30, 30, 30)
    _, together = sample_with_updates(config, prompts, [base, base, base], tokens)
    assert any(len(np.unique(c.versions)) > 1 for c in together)
    in_company = {(c.request_id, c.index): c for c in together}
    for number, prompt in enumerate(prompts):
        engine = HFEngine(config, PromptProcessor(config.model))
        request = request_for(config, prompt, number, tokens=tokens[number])
        alone = asyncio.run(asyncio.wait_for(updated_in_flight(engine, [request], [base]), 60))
        for completion in alone:
            same = in_company[number, completion.index]
            np.testing.assert_array_equal(completion.token_ids, same.token_ids)
            np.testing.assert_allclose(completion.logprobs, same.logprobs, atol=1e-5)


# --- failures, pause, close -----------------------------------------------------------------------------


def test_a_half_taken_update_stops_the_engine(make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]) -> None:
    """Only the first tensors of the version arrive."""
    config = make_config()

    async def scenario() -> None:
        async with running_engine(config, prompts[0], tokens=2000) as (engine, task):
            with pytest.raises(ValueError, match="tensors were not published"):
                await engine.update_weights(1, list(initial_weights(config).items())[:3])
            for work in (task, complete_all(engine, [request_for(config, prompts[0], 1, tokens=2)])):
                with pytest.raises(EngineDied, match=r"the hf engine has stopped: .* not published"):
                    await work
            assert engine.version == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_failed_step_returns_its_requests_and_the_engine_goes_on(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    step = DecodeBatch.step
    failures = iter([RuntimeError("out of memory")])

    def fail_once(self: DecodeBatch, version: int) -> list[DecodeRow]:
        for failure in failures:
            raise failure
        return step(self, version)

    monkeypatch.setattr(DecodeBatch, "step", fail_once)

    async def scenario() -> None:
        async with running_engine(config, prompts[0], tokens=5) as (engine, task):
            with pytest.raises(RuntimeError, match="out of memory"):
                await task
            assert len(await complete_all(engine, [request_for(config, prompts[0], 0, tokens=5)])) == 2

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("where", ["join", "_forward", "_sample", "keep"])
def test_of_tickets_that_fail_together_only_the_one_at_fault_fails(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The others sample the same tokens as beside one that does not fail, each of them once."""
    config = make_config()
    tokens = (12, 30, 21, 30)
    _, undisturbed = sample_with_updates(config, prompts, [initial_weights(config)], tokens)
    work, attempts = getattr(DecodeBatch, where), list[int]()

    def fail(self: DecodeBatch, *arguments: Any) -> Any:
        joining = arguments[0].rows if where == "join" else []
        guilty = [row for row in (*self.rows, *joining) if row.request.request_id == 1]
        if guilty and (where == "join" or len(guilty[0].token_ids) >= 12):
            attempts.append(len({row.request.request_id for row in (*self.rows, *joining)}))
            raise RuntimeError("out of memory")
        return work(self, *arguments)

    async def scenario() -> list[Completion | FailedRequest]:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        await engine.update_weights(0, initial_weights(config).items())
        monkeypatch.setattr(DecodeBatch, where, fail)
        requests = [request_for(config, prompts[i], i, tokens=tokens[i]) for i in range(4)]
        items = [item async for item in engine.generate(requests)]
        assert not engine.usage.sequences_running
        await engine.close()
        return items

    items = asyncio.run(asyncio.wait_for(scenario(), 60))
    failed = [item for item in items if isinstance(item, FailedRequest)]
    assert [item.request_id for item in failed] == ([1] if where != "keep" else []), "its rows were finished"
    assert attempts[0] > 1
    assert attempts[-1] == 1
    done = {(item.request_id, item.index): item for item in items if isinstance(item, Completion)}
    assert len(done) + len(failed) == len(items)
    assert {key for key in done if key[0] != 1} == {(number, index) for number in (0, 2, 3) for index in (0, 1)}
    for same in undisturbed:
        if same.request_id != 1:
            completion = done[same.request_id, same.index]
            np.testing.assert_array_equal(completion.token_ids, same.token_ids)
            np.testing.assert_allclose(completion.logprobs, same.logprobs, atol=1e-5)


def test_closing_ends_every_wait(make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]) -> None:
    config = make_config(rollout={"weight_update": "drain"})

    async def scenario() -> None:
        async with running_engine(config, prompts[0], tokens=2000) as (engine, task):
            update = asyncio.create_task(engine.update_weights(1, ()))
            await asyncio.sleep(0)
            await engine.close()
            for waiting in (task, update):
                with pytest.raises(EngineDied, match="closed"):
                    await waiting

    asyncio.run(asyncio.wait_for(scenario(), 60))
