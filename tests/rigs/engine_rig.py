"""A real engine of a plug-in for many tests: started once, on a loop of its own, its weights in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.schema import RunConfig
from asyncrl.models.published import tensor_bytes
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import Sampling, WeightManifest
from protocol.weights import Publication, Tensor
from rollout_server.engines.base import Completion, EngineDied, GenerationRequest
from rollout_server.weights.receiver import WeightReceiver
from tests.rigs.policies import Weights, complete_all, encoded_prompt, gaps

FP32 = 1e-4
"""Largest difference of one log-prob between two implementations; measured: 1e-5."""
START_S = 300.0
"""Deadline in seconds for the start of an engine, on a machine that does other things, too."""
QUESTION = "What is the sum of the digits?"
T = TypeVar("T")


class Rig:
    """A started engine, and what a learner would have.

    Private parts of the engine are changed where a test needs a mode of its own: a start takes long.
    """

    def __init__(self, config: RunConfig, weights: Weights):
        self.config = config
        self.processor = PromptProcessor(config.model)
        self.loop = asyncio.new_event_loop()
        self.engine = self.make_engine()
        self.publication = Publication("engine-tests", Path("/dev/shm"))
        self.initial = weights
        self.version = 0
        self.numbers = 0
        self.run(self.engine.start(), START_S)

    def make_engine(self) -> Any:
        raise NotImplementedError

    def revive(self) -> None:
        try:
            self.engine.check_alive()
        except EngineDied:
            self.run(self.engine.close())
            self.engine = self.make_engine()
            self.run(self.engine.start(), START_S)

    def make_ready(self) -> None:
        """The initial weights and the default mode. Starts the engine again if an earlier test has ended it: workers
        take tests in any order."""
        self.revive()
        self.mode("recompute")
        self.run(self.update(self.initial))

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
        encoded = encoded_prompt(self.processor, text, *images)
        settings = {"temperature": 0, "stop_token_ids": (), "banned_token_ids": self.processor.placeholder_ids}
        seed = sampling.pop("seed", 1000 + self.numbers)
        return GenerationRequest(
            self.numbers,
            encoded,
            size,
            seed,
            Sampling(max_new_tokens=tokens, **{**settings, **sampling}),
        )

    async def complete(self, requests: Sequence[GenerationRequest]) -> dict[tuple[int, int], Completion]:
        return {(c.request_id, c.index): c for c in await complete_all(self.engine, requests)}

    def sample(self, *requests: GenerationRequest) -> dict[tuple[int, int], Completion]:
        return self.run(self.complete(requests))

    def publish(self, weights: Weights) -> WeightManifest:
        self.version += 1
        tensors = [
            Tensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), [tensor_bytes(t)])
            for name, t in weights.items()
        ]
        return self.publication.publish(self.version, tensors, getattr(self.engine, "_adapter", None))

    async def update(self, weights: Weights) -> int:
        """Update as the server does: the learner's file, verified, into the engine."""
        manifest = self.publish(weights)
        receiver = WeightReceiver(
            self.config.model.path,
            self.config.network,
            self.config.first_meeting_s,
            self.engine,
            "shm",
            "",
        )
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


def with_images(request: GenerationRequest, *images: bytes) -> GenerationRequest:
    """The request with other pictures than those that its prompt was measured with."""
    return replace(request, prompt=replace(request.prompt, images=images))


def gap_to(
    rig: Rig, weights: Weights, request: GenerationRequest, done: Completion, config: RunConfig | None = None
) -> float:
    """Largest |engine - fresh forward pass| of a completion under these weights, whatever version it is stamped with,
    of the model of `config`, or the rig's."""
    policies = dict.fromkeys(done.versions.tolist(), weights)
    return float(gaps(config or rig.config, policies, request, done).max())
