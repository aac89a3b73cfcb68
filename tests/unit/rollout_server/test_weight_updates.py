"""New weights under running sequences: what each mode of `rollout.weight_update` does to their tokens."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.loading import load_model
from asyncrl.models.processing import EncodedPrompt, PromptProcessor
from asyncrl.models.published import load_published, published_tensors
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from protocol.messages import ChatMessage, ImagePart, Prompt, Sampling, TextPart
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, EngineDied, GenerationRequest, InferenceEngine, kv_versions_column
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow
from rollout_server.engines.hf.engine import HFEngine

MakeConfig = Callable[..., RunConfig]
Weights = dict[str, torch.Tensor]
CPU = torch.device("cpu")
TEMPERATURE = 0.8


@pytest.fixture
def prompts(make_config: MakeConfig) -> tuple[EncodedPrompt, ...]:
    """Two images, one, none, and one of another size: four lengths."""
    processor = PromptProcessor(make_config().model)
    blobs: dict[str, bytes] = {}

    def encode(row: str, text: str, *sizes: tuple[int, int]) -> EncodedPrompt:
        hashes = []
        for number, size in enumerate(sizes):
            pixels = np.random.default_rng(number + len(blobs)).integers(0, 256, (size[1], size[0], 3), np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            hashes.append(hashlib.sha256(buffer.getvalue()).hexdigest())
            blobs[hashes[-1]] = buffer.getvalue()
        content = (*(ImagePart() for _ in sizes), TextPart(text=text))
        message = ChatMessage(role="user", content=content)
        return processor.encode(Prompt(row_id=row, messages=(message,), image_hashes=tuple(hashes)), blobs)

    encoded = (
        encode("two", "What is the sum of the digits?", (56, 28), (28, 28)),
        encode("one", "What is the largest digit?", (56, 28)),
        encode("none", "answer 1 2 3"),
        encode("tall", "read", (28, 84)),
    )
    assert len({len(prompt.token_ids) for prompt in encoded}) == 4
    return encoded


def request_for(
    config: RunConfig, prompt: EncodedPrompt, number: int, *, tokens: int, size: int = 2, **sampling: Any
) -> GenerationRequest:
    """No stop token: the length is known."""
    banned = PromptProcessor(config.model).placeholder_ids
    settings = {"temperature": TEMPERATURE, "stop_token_ids": (), "banned_token_ids": banned, **sampling}
    return GenerationRequest(number, prompt, size, 1000 + number, Sampling(max_new_tokens=tokens, **settings))


def initial_weights(config: RunConfig) -> Weights:
    return {name: tensor.clone() for name, tensor in published_tensors(load_model(config.model, device=CPU))}


def moved(weights: Weights, seed: int) -> Weights:
    """A policy that differs visibly."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=random)
        if tensor.is_floating_point() and tensor.ndim > 1
        else tensor
        for name, tensor in weights.items()
    }


def fresh_logits(model: Any, prompt: EncodedPrompt, token_ids: Sequence[int]) -> torch.Tensor:
    """[T + 1, V] of one plain forward pass: what predicts each completion token, and the one after them."""
    ids = np.concatenate([prompt.token_ids, np.asarray(token_ids, np.int32)])[None]
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids).long()}
    if prompt.pixel_values is not None:
        types = np.concatenate([prompt.token_types, np.zeros(len(token_ids), np.int32)])[None]
        inputs["pixel_values"] = prompt.pixel_values
        inputs["image_grid_thw"] = torch.from_numpy(prompt.image_grids).long()
        inputs["mm_token_type_ids"] = torch.from_numpy(types).long()
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits[0, len(prompt.token_ids) - 1 :]


def gaps(config: RunConfig, policies: Sequence[Weights], request: GenerationRequest, done: Completion) -> np.ndarray:
    """[T] |engine - fresh forward| of each token under the weights of the version that it is stamped with."""
    model = load_model(config.model, device=CPU)
    gap = np.zeros(len(done.token_ids))
    for version in np.unique(done.versions):
        load_published(model, policies[version].items())
        logits = fresh_logits(model, request.prompt, done.token_ids[:-1].tolist())
        banned = torch.tensor(request.sampling.banned_token_ids)
        logprobs = sampling_logprobs(logits, temperature=request.sampling.temperature, banned=banned)
        chosen = gather_logprobs(logprobs, torch.from_numpy(done.token_ids).long()).numpy()
        at = done.versions == version
        gap[at] = np.abs(chosen - done.logprobs)[at]
    return gap


# --- the decode batch: rebuilding a cache ---------------------------------------------------------------


def running_batch(config: RunConfig, prompts: Sequence[EncodedPrompt]) -> DecodeBatch:
    """Sequences of mixed prompts and mixed ages, one of them one token old."""
    model = load_model(config.model, device=CPU)
    batch = DecodeBatch(model, PromptProcessor(config.model).placeholder_ids, CPU)
    for number, prompt in enumerate(prompts):
        batch.admit([request_for(config, prompt, number, tokens=50)], version=0)
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
    batch.rebuild_cache(version=1)

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
            assert row.kv_versions[-1] == row.versions[-1] == 1
    assert batch._attention.shape[1] == max(int(row.sum()) for row in batch._attention), "no gap is left"


def test_a_rebuild_computes_each_prompt_and_its_image_once(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    model: Any = load_model(config.model, device=CPU)
    batch = DecodeBatch(model, PromptProcessor(config.model).placeholder_ids, CPU)
    batch.admit([request_for(config, prompt, i, tokens=9, size=4) for i, prompt in enumerate(prompts)], version=0)
    for _ in range(3):
        batch.step(version=0)
    pixels: list[int] = []
    forward = model.model.visual.forward
    monkeypatch.setattr(model.model.visual, "forward", lambda h, **k: pixels.append(len(h)) or forward(h, **k))
    batch.rebuild_cache(version=1)
    assert pixels == [sum(len(p.pixel_values) for p in prompts if p.pixel_values is not None)]


# --- the engine: updates while sequences run ------------------------------------------------------------


async def updated_in_flight(
    engine: InferenceEngine, requests: Sequence[GenerationRequest], policies: Sequence[Weights]
) -> list[Completion]:
    """Generate; take the next policy up whenever a request of the first ones has finished."""
    await engine.start()
    await engine.update_weights(0, policies[0].items())
    later = list(enumerate(policies))[1:]
    completions: list[Completion] = []
    try:
        async for completion in engine.generate(requests):
            completions.append(completion)
            if later:
                version, weights = later.pop(0)
                await engine.update_weights(version, weights.items())
    finally:
        await engine.close()
    return completions


def sample_with_updates(
    config: RunConfig, prompts: Sequence[EncodedPrompt], policies: Sequence[Weights], tokens: Sequence[int]
) -> tuple[list[GenerationRequest], list[Completion]]:
    engine = create_engine(config, PromptProcessor(config.model))
    requests = [request_for(config, p, i, tokens=n) for i, (p, n) in enumerate(zip(prompts, tokens, strict=True))]
    done = asyncio.run(asyncio.wait_for(updated_in_flight(engine, requests, policies), 120))
    assert len(done) == 2 * len(requests)
    return requests, done


LENGTHS = (6, 60, 120, 120)
"""When the first is done, the others are running."""


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_versions_are_stamped_per_token_and_never_fall(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], mode: str
) -> None:
    config = make_config(rollout={"weight_update": mode})
    base = initial_weights(config)
    policies = [base, moved(base, 1), moved(base, 2)]
    _, done = sample_with_updates(config, prompts, policies, LENGTHS)
    assert max(len(np.unique(c.versions)) for c in done) >= 2
    for completion in done:
        assert (np.diff(completion.versions) >= 0).all()
        assert len(completion.versions) == len(completion.token_ids) == LENGTHS[completion.request_id]


def test_recomputed_tokens_match_the_policy_that_they_are_stamped_with(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    config = make_config(rollout={"weight_update": "recompute"})
    base = initial_weights(config)
    policies = [base, moved(base, 1), moved(base, 2)]
    requests, done = sample_with_updates(config, prompts, policies, LENGTHS)
    assert all(c.kv_versions is None for c in done)
    for completion in done:
        gap = gaps(config, policies, requests[completion.request_id], completion)
        assert gap.max() < 1e-5, (completion.request_id, completion.versions)


def test_kept_caches_give_tokens_of_no_single_policy_and_say_so(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    config = make_config(rollout={"weight_update": "keep"})
    base = initial_weights(config)
    policies = [base, moved(base, 1), moved(base, 2)]
    requests, done = sample_with_updates(config, prompts, policies, LENGTHS)
    mixed = [c for c in done if c.kv_versions is not None]
    assert mixed
    for completion in done:
        kv = completion.versions if completion.kv_versions is None else completion.kv_versions
        gap = gaps(config, policies, requests[completion.request_id], completion)
        assert (kv <= completion.versions).all()
        assert len(np.unique(kv)) == 1, "the cache keeps its oldest entry"
        assert (completion.kv_versions is None) == (len(np.unique(completion.versions)) == 1)
        assert gap[kv == completion.versions].max() < 1e-5
        if completion.kv_versions is not None:
            assert gap[kv < completion.versions].max() > 1e-3
    column = kv_versions_column(done)
    assert column is not None
    assert column.dtype == np.int32
    assert len(column) == sum(len(c.token_ids) for c in done)
    assert kv_versions_column([c for c in done if c.kv_versions is None]) is None


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
            return asyncio.create_task(_all(engine, requests))

        running = sample(0, 1)
        while not engine.usage.sequences_running:
            await asyncio.sleep(0.001)
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
        assert completion.kv_versions is None


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_the_scripted_engine_stamps_each_token(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], mode: str
) -> None:
    script = {"mean_length": 30, "seconds_per_token": 0.002}
    config = make_config(rollout={"weight_update": mode, "engine": "scripted", "engine_args": script})

    async def scenario() -> list[Completion]:
        engine = create_engine(config, PromptProcessor(config.model))
        await engine.start()
        request = request_for(config, prompts[0], 0, tokens=40, stop_token_ids=(1,))
        task = asyncio.create_task(_all(engine, [request]))
        await asyncio.sleep(0.02)
        await engine.update_weights(3, ())
        return await task

    for completion in asyncio.run(asyncio.wait_for(scenario(), 60)):
        assert set(completion.versions.tolist()) == {0, 3}
        assert (np.diff(completion.versions) >= 0).all()
        if mode == "recompute":
            assert completion.kv_versions is None
        else:
            assert completion.kv_versions is not None
            assert (completion.kv_versions == 0).all()


async def _all(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [c async for c in engine.generate(requests)]


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


# --- failures -------------------------------------------------------------------------------------------


def half_an_update_stops_the_engine(config: RunConfig, prompt: EncodedPrompt, published: Weights) -> None:
    """Of `published` only the first tensors arrive."""

    async def scenario() -> None:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        task = asyncio.create_task(_all(engine, [request_for(config, prompt, 0, tokens=2000)]))
        while not engine.usage.sequences_running:
            await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match="tensors were not published"):
            await engine.update_weights(1, list(published.items())[:3])
        with pytest.raises(EngineDied, match=r"the hf engine has stopped: .* not published"):
            await task
        with pytest.raises(EngineDied, match=r"the hf engine has stopped: .* not published"):
            await _all(engine, [request_for(config, prompt, 1, tokens=2)])
        assert engine.version == 0
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_half_taken_update_stops_the_engine(make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]) -> None:
    config = make_config()
    half_an_update_stops_the_engine(config, prompts[0], initial_weights(config))


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
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        request = request_for(config, prompts[0], 0, tokens=5)
        with pytest.raises(RuntimeError, match="out of memory"):
            await _all(engine, [request])
        assert len(await _all(engine, [request])) == 2
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_nobody_waits_for_an_engine_that_closes(make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]) -> None:
    config = make_config(rollout={"weight_update": "drain"})

    async def scenario() -> None:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        task = asyncio.create_task(_all(engine, [request_for(config, prompts[0], 0, tokens=2000)]))
        while not engine.usage.sequences_running:
            await asyncio.sleep(0.001)
        update = asyncio.create_task(engine.update_weights(1, ()))
        await asyncio.sleep(0)
        await engine.close()
        for waiting in (task, update):
            with pytest.raises(EngineDied, match="closed"):
                await waiting

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_paused_engine_refuses_to_drain_but_takes_weights_in_flight(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    async def scenario(mode: str) -> list[Completion]:
        config = make_config(rollout={"weight_update": mode})
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        task = asyncio.create_task(_all(engine, [request_for(config, prompts[0], 0, tokens=300)]))
        while not engine.usage.sequences_running:
            await asyncio.sleep(0.001)
        await engine.pause()
        weights = initial_weights(config)
        if mode == "drain":
            with pytest.raises(BadStateError, match="2 sequences cannot finish while the engine is paused"):
                await engine.update_weights(1, weights.items())
        else:
            await engine.update_weights(1, weights.items())
        await engine.resume()
        done = await task
        await engine.close()
        return done

    for mode, newest in (("drain", 0), ("recompute", 1)):
        done = asyncio.run(asyncio.wait_for(scenario(mode), 60))
        assert {int(c.versions[-1]) for c in done} == {newest}


def test_closing_the_iterator_drops_what_still_runs(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    config = make_config()

    async def scenario() -> None:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        requests = [
            request_for(config, prompts[0], 0, tokens=3),
            request_for(config, prompts[1], 1, tokens=2000),
        ]
        stream = engine.generate(requests)
        async for completion in stream:
            assert completion.request_id == 0
            break
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            while engine.usage.sequences_running or engine.usage.sequences_queued:
                await asyncio.sleep(0.005)
        assert len(await _all(engine, requests[:1])) == 2
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
