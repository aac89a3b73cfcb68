"""Policies for tests of engines: weights that differ visibly, prompts with images, samples across updates, and the
log-probs of plain forward passes to compare them with."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.models.loading import load_model
from asyncrl.models.published import load_published, published_tensors
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs, truncated_logprobs
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, ImagePart, Prompt, Sampling, TextPart
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, FailedRequest, GenerationRequest, InferenceEngine
from rollout_server.engines.hf.engine import HFEngine

MakeConfig = Callable[..., RunConfig]
Weights = dict[str, torch.Tensor]
CPU = torch.device("cpu")
TEMPERATURE = 0.8
LENGTHS = (6, 60, 120, 120)
"""Update when the first is done and the others are running."""


def picture(seed: int, width: int = 56, height: int = 28) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def encoded_prompt(processor: PromptProcessor, text: str, *images: bytes) -> EncodedPrompt:
    """Images first, then the text."""
    hashes = tuple(content_hash(data) for data in images)
    message = ChatMessage(role="user", content=(*(ImagePart() for _ in images), TextPart(text=text)))
    prompt = Prompt(row_id=f"row with {len(images)} images", messages=(message,), image_hashes=hashes)
    return processor.encode(prompt, dict(zip(hashes, images, strict=True)))


@pytest.fixture
def prompts(make_config: MakeConfig) -> tuple[EncodedPrompt, ...]:
    """Two images, one, none, and one of another size: four lengths."""
    processor = PromptProcessor(make_config().model)
    encoded = (
        encoded_prompt(processor, "What is the sum of the digits?", picture(0), picture(1, 28, 28)),
        encoded_prompt(processor, "What is the largest digit?", picture(2)),
        encoded_prompt(processor, "answer 1 2 3"),
        encoded_prompt(processor, "read", picture(3, 28, 84)),
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


def moved(weights: Weights, seed: int, *, only: str = "", by: float = 0.2) -> Weights:
    """A policy that differs visibly, in the tensors that have `only` in their names."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: tensor + by * tensor.std() * torch.randn(tensor.shape, generator=random)
        if only in name and tensor.is_floating_point() and tensor.ndim > 1
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


def gaps(
    config: RunConfig,
    policies: Mapping[int, Weights] | Sequence[Weights],
    request: GenerationRequest,
    done: Completion,
) -> np.ndarray:
    """[T] |engine - fresh forward| of each token under the weights of the version that it is stamped with."""
    model, s = load_model(config.model, device=CPU), request.sampling
    gap = np.zeros(len(done.token_ids))
    for version in np.unique(done.versions).tolist():
        load_published(model, policies[version].items())
        logits = fresh_logits(model, request.prompt, done.token_ids[:-1].tolist())
        banned = torch.tensor(s.banned_token_ids)
        logprobs = sampling_logprobs(logits, temperature=s.temperature or 1.0, banned=banned)
        if s.truncates:
            columns = (torch.full((len(logprobs),), v, dtype=torch.float64) for v in (s.top_k, s.top_p, s.min_p))
            logprobs = truncated_logprobs(logprobs, **dict(zip(("top_k", "top_p", "min_p"), columns, strict=True)))
        chosen = gather_logprobs(logprobs, torch.from_numpy(done.token_ids).long()).numpy()
        at = done.versions == version
        gap[at] = np.abs(chosen - done.logprobs)[at]
    return gap


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
            completions.append(completed(completion))
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


def completed(item: Completion | FailedRequest) -> Completion:
    """Raise what a request failed with."""
    if isinstance(item, FailedRequest):
        raise item.error
    return item


async def complete_all(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [completed(item) async for item in engine.generate(requests)]


async def until_running(engine: InferenceEngine) -> None:
    while not engine.usage.sequences_running:
        await asyncio.sleep(0.001)


@asynccontextmanager
async def running_engine(
    config: RunConfig, prompt: EncodedPrompt, *, tokens: int
) -> AsyncIterator[tuple[HFEngine, asyncio.Task[list[Completion]]]]:
    """A started hf engine, and a task that gets the two completions that it samples."""
    engine = HFEngine(config, PromptProcessor(config.model))
    await engine.start()
    task = asyncio.create_task(complete_all(engine, [request_for(config, prompt, 0, tokens=tokens)]))
    while not (engine.usage.sequences_running or task.done()):
        await asyncio.sleep(0.001)
    yield engine, task
    await engine.close()
