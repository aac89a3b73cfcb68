"""The embedded engine: transformers on CPU or GPU, sequences joining and leaving one decode batch.

A thread of its own decodes; the event loop hands it requests and takes completions. New weights are taken up
when the running sequences have finished (`drain`): no completion mixes two policies.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.loading import architecture_fingerprint, load_model, resolve_device
from asyncrl.models.processing import PromptProcessor
from asyncrl.models.published import load_published
from rollout_server.engines.base import Completion, EngineUsage, GenerationRequest
from rollout_server.engines.decode_batch import DecodeBatch

logger = logging.getLogger(__name__)

Deliver = Callable[[Completion | Exception], None]


class HFEngine:
    name = "hf"

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        self._config = config
        self._placeholder_ids = processor.placeholder_ids
        self._device = resolve_device(config.rollout.device)
        self._wake_up = threading.Condition()
        self._queue: deque[tuple[GenerationRequest, Deliver]] = deque()
        self._commands: deque[tuple[Callable[[], None], Callable[[Exception | None], None]]] = deque()
        self._deliver: dict[int, Deliver] = {}
        self._paused = False
        self._asleep = False
        self._closing = False
        self._version = 0
        self._tokens_generated = 0
        self._busy_s = 0.0

    # --- life cycle -------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._decode_loop, name="hf-decode", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        self._model: Any = load_model(self._config.model, device=self._device).eval().requires_grad_(False)
        self._fingerprint = architecture_fingerprint(self._model)
        self._batch = DecodeBatch(self._model, self._placeholder_ids, self._device)

    async def close(self) -> None:
        with self._wake_up:
            self._closing = True
            self._wake_up.notify_all()
        await asyncio.to_thread(self._thread.join, 30.0)
        if self._thread.is_alive():
            logger.warning("the decode thread did not stop within 30 s; it ends with the process")

    @property
    def architecture_fingerprint(self) -> str:
        return self._fingerprint

    @property
    def version(self) -> int:
        return self._version

    @property
    def usage(self) -> EngineUsage:
        queued = sum(request.group_size for request, _ in list(self._queue))
        return EngineUsage(self._tokens_generated, self._busy_s, len(self._batch.rows), queued)

    # --- the event loop's side --------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            self._check(request)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Completion | Exception] = asyncio.Queue()

        def deliver(item: Completion | Exception) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        with self._wake_up:  # one lock hold: the decode thread sees all of them or none
            self._queue.extend((request, deliver) for request in requests)
            self._wake_up.notify_all()
        for _ in range(sum(request.group_size for request in requests)):
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def _check(self, request: GenerationRequest) -> None:
        if request.group_size > self._config.rollout.max_concurrent_sequences:
            raise UserError(
                f"a group of {request.group_size} cannot be decoded together: rollout.max_concurrent_sequences is "
                f"{self._config.rollout.max_concurrent_sequences}"
            )
        unbanned = set(self._placeholder_ids) - set(request.sampling.banned_token_ids)
        if unbanned:
            raise UserError(
                f"ticket {request.request_id} allows image placeholder ids {sorted(unbanned)} to be sampled. "
                "A completion with one of them cannot be trained; ban them in the ticket's sampling"
            )

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        def swap() -> None:
            load_published(self._model, tensors)
            self._version = version

        await self._between_batches(swap)

    async def pause(self) -> None:
        with self._wake_up:
            self._paused = True

    async def resume(self) -> None:
        with self._wake_up:
            self._paused = False
            self._wake_up.notify_all()

    async def sleep(self) -> None:
        """Finish what runs, then move the weights to host memory."""
        await self._between_batches(lambda: self._move(torch.device("cpu"), asleep=True))

    async def wake(self) -> None:
        await self._between_batches(lambda: self._move(self._device, asleep=False))

    def _move(self, device: torch.device, *, asleep: bool) -> None:
        self._model.to(device)
        self._asleep = asleep
        if asleep and self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def _between_batches(self, command: Callable[[], None]) -> None:
        """Run `command` on the decode thread when no sequence is running."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not finished.done():
                finished.set_exception(error) if error else finished.set_result(None)

        def done(error: Exception | None) -> None:
            loop.call_soon_threadsafe(settle, error)

        with self._wake_up:
            self._commands.append((command, done))
            self._wake_up.notify_all()
        await finished

    # --- the decode thread's side -----------------------------------------------------------

    def _decode_loop(self) -> None:
        while True:
            with self._wake_up:
                while not self._closing and not self._has_work():
                    self._wake_up.wait()
                if self._closing:
                    return
                commands = self._take_commands()
                admitted = [] if self._commands else self._take_admissible()
            for command, done in commands:
                self._run_command(command, done)
            started = time.monotonic()
            try:
                self._advance(admitted)
            except Exception as error:  # handed to every waiter; the service stops with it
                logger.exception("decoding failed")
                self._fail_all(error)
            self._busy_s += time.monotonic() - started

    def _has_work(self) -> bool:
        if self._commands and not self._batch.rows:
            return True
        return not self._paused and not self._asleep and bool(self._queue or self._batch.rows)

    def _take_commands(self) -> list[tuple[Callable[[], None], Callable[[Exception | None], None]]]:
        """Commands wait until no sequence is running; until then nothing new is admitted."""
        if self._batch.rows:
            return []
        taken = list(self._commands)
        self._commands.clear()
        return taken

    def _take_admissible(self) -> list[GenerationRequest]:
        """Whole groups that fit. Prefills are worth their cost in bulk: wait for a quarter of the room, or for all."""
        if self._paused or self._asleep or not self._queue:
            return []
        limit = self._config.rollout.max_concurrent_sequences
        room = limit - len(self._batch.rows)
        waiting = sum(request.group_size for request, _ in self._queue)
        if self._batch.rows and room < min(limit // 4, waiting):
            return []
        admitted: list[GenerationRequest] = []
        while self._queue and self._queue[0][0].group_size <= room:
            request, deliver = self._queue.popleft()
            room -= request.group_size
            self._deliver[request.request_id] = deliver
            admitted.append(request)
        return admitted

    def _run_command(self, command: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        try:
            command()
        except Exception as error:
            logger.exception("engine command failed")
            done(error)
        else:
            done(None)

    def _advance(self, admitted: list[GenerationRequest]) -> None:
        finished: list[Completion] = []
        if admitted:
            self._tokens_generated += sum(request.group_size for request in admitted)
            finished += self._batch.admit(admitted, self._version)
        elif self._batch.rows and not self._paused:
            self._tokens_generated += len(self._batch.rows)
            finished += self._batch.step(self._version)
        for completion in finished:
            self._deliver[completion.request_id](completion)
        for request_id in {c.request_id for c in finished} - {r.request.request_id for r in self._batch.rows}:
            del self._deliver[request_id]

    def _fail_all(self, error: Exception) -> None:
        with self._wake_up:
            waiting = {*self._deliver.values(), *(deliver for _, deliver in self._queue)}
            self._deliver.clear()
            self._queue.clear()
            self._batch = DecodeBatch(self._model, self._placeholder_ids, self._device)
        for deliver in waiting:
            deliver(error)
