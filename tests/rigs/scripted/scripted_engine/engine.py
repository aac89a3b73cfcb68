"""An engine for tests: deterministic completions with programmable lengths, latencies and faults, and no model.

`rollout.engine_args` sets the fields of `Script`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.lora import folder_fingerprint
from asyncrl.processing.processor import PromptProcessor
from rollout_server.engines.base import Completion, EngineUsage, FailedRequest, GenerationRequest

logger = logging.getLogger(__name__)


class Script(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    """Every completion is this text; empty means random tokens."""
    mean_length: float = 8.0
    """Median of the log-normal length of random completions, in tokens."""
    length_sigma: float = 0.0
    """Sigma of the log-normal; 0 gives every completion the same length."""
    seconds_per_token: float = 0.0


class ScriptedEngine:
    name = "scripted"
    takes_pixels = False
    processes = None

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        self._config = config
        self._processor = processor
        self._script = Script.model_validate(config.rollout.engine_args)
        self._slots = asyncio.Semaphore(config.rollout.max_concurrent_sequences)
        self._changed = asyncio.Condition()
        """Notified whenever one of the next three changes."""
        self._running = 0
        self._admits = True
        self._asleep = False
        self._version = 0
        self._tasks: dict[int, set[asyncio.Task[Completion]]] = {}
        """Tasks of each request's first turns."""
        self._interrupted: set[asyncio.Task[Completion]] = set()
        self._tokens = 0
        self._busy = 0.0
        self._sequences = 0

    async def start(self) -> None:
        self._fingerprint = await asyncio.to_thread(folder_fingerprint, self._config.model)

    @property
    def architecture_fingerprint(self) -> str:
        return self._fingerprint

    @property
    def version(self) -> int:
        return self._version

    @property
    def usage(self) -> EngineUsage:
        return EngineUsage(self._tokens, self._busy, self._sequences)

    def check_alive(self) -> None:
        pass

    async def interrupt(self, request_ids: Collection[int]) -> None:
        mine = [task for request_id in request_ids for task in self._tasks.get(request_id, ())]
        await asyncio.sleep(0)  # all of these have begun then: cancelled before that they would have no result
        mine = [task for task in mine if not task.done()]
        self._interrupted.update(mine)
        for task in mine:
            task.cancel()
        if mine:
            await asyncio.wait(mine)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        started = time.monotonic()
        tasks = [self._begin(request, index) for request in requests for index in range(request.group_size)]
        self._sequences += len(tasks)
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            self._sequences -= len(tasks)
            self._busy += time.monotonic() - started

    def _begin(self, request: GenerationRequest, index: int) -> asyncio.Task[Completion]:
        task = asyncio.create_task(self._complete(request, index))
        if not request.stream:
            self._tasks.setdefault(request.request_id, set()).add(task)
            task.add_done_callback(lambda _: self._forget(request.request_id, task))
        return task

    def _forget(self, request_id: int, task: asyncio.Task[Completion]) -> None:
        self._interrupted.discard(task)
        self._tasks[request_id].discard(task)
        if not self._tasks[request_id]:
            del self._tasks[request_id]

    async def _complete(self, request: GenerationRequest, index: int) -> Completion:
        versions: list[int] = [self._version] * len(request.prefix(index))
        if request.finish_reason(request.prefix(index)):
            return self._completion(request, index, versions)
        try:
            async with self._slots:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._admits)
                    self._running += 1
                try:
                    await self._sample(request, index, versions)
                finally:
                    self._running -= 1
                    async with self._changed:
                        self._changed.notify_all()
        except asyncio.CancelledError:
            if asyncio.current_task() not in self._interrupted:
                raise
        return self._completion(request, index, versions)

    async def _sample(self, request: GenerationRequest, index: int, versions: list[int]) -> None:
        """Add the version of each token behind the prefix, in its time."""
        total = len(self._tokens_of(request, index))
        while len(versions) < total:
            if self._script.seconds_per_token:
                await asyncio.sleep(self._script.seconds_per_token)
            versions.append(self._version)
            if not self._tokens:
                logger.info("a first token, at %g s a token", self._script.seconds_per_token)
            self._tokens += 1

    def _completion(self, request: GenerationRequest, index: int, sampled_by: Sequence[int]) -> Completion:
        versions, prefix = np.asarray(sampled_by, np.int32), request.prefix(index)
        tokens = self._tokens_of(request, index)[: len(versions)]
        return Completion(
            request_id=request.request_id,
            index=index,
            token_ids=tokens,
            logprobs=np.where(np.arange(len(tokens)) < len(prefix), 0.0, -1.0).astype(np.float32),
            versions=versions,
            finish_reason=request.finish_reason(tokens.tolist()),
            stream=request.stream,
        )

    def _tokens_of(self, request: GenerationRequest, index: int) -> np.ndarray:
        """All tokens of a completion, those of a greedy one without any random number."""
        sampling, ordered = request.sampling, request.requested(index)
        if request.finish_reason(ordered):
            return np.asarray(ordered, np.int32)
        if self._script.text:
            body = self._processor.tokenizer(self._script.text, add_special_tokens=False)["input_ids"]
        else:
            rng = np.random.default_rng(request.seed_of(index))
            length = max(1, round(rng.lognormal(np.log(self._script.mean_length), self._script.length_sigma)))
            never = {*sampling.banned_token_ids, *sampling.stop_token_ids}
            allowed = [i for i in range(len(self._processor.tokenizer)) if i not in never]
            body = rng.choice(allowed, size=length).tolist()
            if request.requests and request.requests[index].greedy:
                body = allowed[:1] * max(1, round(self._script.mean_length))
        tokens = [*ordered, *body, sampling.stop_token_ids[0]]
        return np.asarray(tokens[: sampling.max_new_tokens], np.int32)

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._check_awake()
        for _ in tensors:  # read them all: a test of the weight channel, too
            pass
        if self._config.rollout.weight_update == "drain":
            await self._drain()
        self._version = version
        await self._admit()

    def _check_awake(self) -> None:
        if self._asleep:
            raise BadStateError("the scripted engine is asleep: wake it first")

    async def _drain(self) -> None:
        self._admits = False
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)

    async def _admit(self) -> None:
        async with self._changed:
            self._admits = True
            self._changed.notify_all()

    async def sleep(self) -> None:
        self._check_awake()
        await self._drain()
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False
        await self._admit()

    async def close(self) -> None:
        pass
