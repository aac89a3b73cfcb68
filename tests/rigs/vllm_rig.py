"""A real vLLM engine for many tests: started once, on a loop of its own, its weights published in shared memory."""

from __future__ import annotations

import asyncio
import importlib.util
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.models.loading import load_model
from asyncrl.models.processing import PromptProcessor
from asyncrl.models.published import load_published, tensor_bytes
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs, truncated_logprobs
from protocol.messages import ChatMessage, ImagePart, Prompt, Sampling, TextPart, WeightManifest
from protocol.weights import Publication, Tensor
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.vllm.engine import VLLMEngine
from rollout_server.weights.receiver import WeightReceiver
from tests.rigs.policies import Weights, fresh_logits

MISSING = importlib.util.find_spec("vllm") is None
NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="vLLM is not installed: WITH_VLLM=1 bash scripts/install.sh"),
]
FP32 = 1e-4
"""Largest difference of one log-prob between two implementations; measured: 1e-5."""
QUESTION = "What is the sum of the digits?"
T = TypeVar("T")


def vllm_config(
    model: Path, data: Path, run: Path, /, *, max_response_length: int = 384, **sections: dict[str, Any]
) -> RunConfig:
    """Configuration of an engine for tests; `sections` add to what each section has here."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [str(data / "rl.parquet")],
            "max_prompt_length": 128,
            "max_response_length": max_response_length,
        },
        "batch": {"group_size": 4, "tokens_per_microbatch": 512},
        "rollout": {"engine": "vllm", "max_concurrent_sequences": 32, "cpu_threads": 1},
        "reward": {"functions": [{"function": "exact_match"}]},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    return RunConfig.model_validate({"run_dir": str(run), **merged})


class Rig:
    """A started engine, and what a learner would have.

    Private parts of the engine are changed where a test needs a mode of its own: a start takes long.
    """

    def __init__(self, config: RunConfig, weights: Weights):
        self.config = config
        self.processor = PromptProcessor(config.model)
        self.loop = asyncio.new_event_loop()
        self.engine = VLLMEngine(config, self.processor)
        self.publication = Publication("vllm-tests", Path("/dev/shm"))
        self.initial = weights
        self.version = 0
        self.numbers = 0
        self.run(self.engine.start())

    def run(self, work: Awaitable[T], timeout_s: float = 120.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        return self.loop.run_until_complete(bounded())

    def mode(self, weight_update: str) -> None:
        rollout = self.config.rollout.model_copy(update={"weight_update": weight_update})
        self.engine._config = self.config.model_copy(update={"rollout": rollout})

    def request(self, text: str, *images: bytes, tokens: int = 16, size: int = 1, **sampling: Any) -> GenerationRequest:
        """No stop token unless given: the length is known."""
        self.numbers += 1
        hashes = tuple(content_hash(data) for data in images)
        content = (*(ImagePart() for _ in images), TextPart(text=text))
        prompt = Prompt(
            row_id=f"row {self.numbers}", messages=(ChatMessage(role="user", content=content),), image_hashes=hashes
        )
        encoded = self.processor.encode(prompt, dict(zip(hashes, images, strict=True)))
        settings = {"temperature": 0, "stop_token_ids": (), "banned_token_ids": self.processor.placeholder_ids}
        seed = sampling.pop("seed", 1000 + self.numbers)
        return GenerationRequest(
            self.numbers,
            encoded,
            size,
            seed,
            Sampling(max_new_tokens=tokens, **{**settings, **sampling}),
            images,
        )

    async def complete(self, requests: Sequence[GenerationRequest]) -> dict[tuple[int, int], Completion]:
        return {(c.request_id, c.index): c async for c in self.engine.generate(requests)}

    def sample(self, *requests: GenerationRequest) -> dict[tuple[int, int], Completion]:
        return self.run(self.complete(requests))

    def publish(self, weights: Weights) -> WeightManifest:
        self.version += 1
        tensors = [
            Tensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), tensor_bytes(t))
            for name, t in weights.items()
        ]
        return self.publication.publish(self.version, tensors, self.engine._adapter)

    async def update(self, weights: Weights) -> int:
        """As the server does it: the learner's file, verified, into the engine."""
        manifest = self.publish(weights)
        receiver = WeightReceiver(self.config, self.engine, "shm", "")
        return (await receiver.load(manifest)).version

    async def update_after(
        self, weights: Weights, tokens: int, requests: Sequence[GenerationRequest]
    ) -> dict[tuple[int, int], Completion]:
        """New weights when so many tokens of the requests have been sampled."""
        started = self.engine.usage.tokens_generated
        sampling = asyncio.create_task(self.complete(requests))
        while self.engine.usage.tokens_generated < started + tokens:
            assert not sampling.done(), "the requests were too short"
            await asyncio.sleep(0.001)
        await self.update(weights)
        return await sampling

    def close(self) -> None:
        self.run(self.engine.close())
        self.publication.close()
        self.loop.close()


def changed(weights: Weights, wanted: Callable[[str], bool], seed: int) -> Weights:
    """Only what `wanted` names differs, and visibly."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.5 * t.std() * torch.randn(t.shape, generator=random) if wanted(name) and t.ndim > 1 else t
        for name, t in weights.items()
    }


async def first(completions: AsyncIterator[Completion]) -> Completion:
    async for completion in completions:
        return completion
    raise AssertionError("nothing came")


def picture(seed: int, width: int = 56, height: int = 28) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def gap_to(
    rig: Rig, weights: Weights, request: GenerationRequest, done: Completion, config: RunConfig | None = None
) -> float:
    """Largest |engine - fresh forward pass| of a completion under these weights of the model of `config`, or the
    rig's."""
    model = load_model((config or rig.config).model, device=torch.device("cpu"))
    load_published(model, weights.items())
    s = request.sampling
    logits = fresh_logits(model, request.prompt, done.token_ids[:-1].tolist())
    banned = torch.tensor(s.banned_token_ids)
    logprobs = sampling_logprobs(logits, temperature=s.temperature or 1.0, banned=banned)
    if s.truncates:
        n = len(logprobs)
        top_k, top_p, min_p = (torch.full((n,), v, dtype=torch.float64) for v in (s.top_k, s.top_p, s.min_p))
        logprobs = truncated_logprobs(logprobs, top_k=top_k, top_p=top_p, min_p=min_p)
    chosen = gather_logprobs(logprobs, torch.from_numpy(done.token_ids).long()).numpy()
    return float(np.abs(chosen - done.logprobs).max())
