"""A real vLLM engine for many tests: started once, on a loop of its own, its weights published in shared memory."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from asyncrl.models.published import tensor_bytes
from protocol.messages import ChatMessage, ImagePart, Prompt, Sampling, TextPart, WeightManifest
from protocol.weights import Publication, Tensor
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.vllm.engine import VLLMEngine
from rollout_server.weights.receiver import WeightReceiver
from tests.unit.rollout_server.test_weight_updates import Weights

MISSING = importlib.util.find_spec("vllm") is None
T = TypeVar("T")


def vllm_config(
    model: Path, data: Path, run: Path, /, *, max_response_length: int = 384, **sections: dict[str, Any]
) -> RunConfig:
    """Of an engine for tests; `sections` add to what each of theirs has here."""
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
    """`engine` and what a learner would have. Private parts of the engine are changed where a test needs a mode of its
    own: a start takes long."""

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
        hashes = tuple(content_hash_of(data) for data in images)
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


def content_hash_of(data: bytes) -> str:
    from asyncrl.data.images import content_hash

    return content_hash(data)


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
