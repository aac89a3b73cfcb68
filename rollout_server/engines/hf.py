"""The embedded engine: transformers on CPU or GPU, sequences joining and leaving one decode batch.

New weights are taken up between two decode steps; `rollout.weight_update` decides what becomes of the sequences
that are running (docs/decisions/006-in-flight-updates.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.adapter_targets import resolve_adapter
from asyncrl.models.loading import architecture_fingerprint, load_model, resolve_device
from asyncrl.models.lora import add_adapter
from asyncrl.models.processing import PromptProcessor
from asyncrl.models.published import load_published
from rollout_server.engines.base import Completion, EngineUsage, GenerationRequest
from rollout_server.engines.decode_batch import DecodeBatch
from rollout_server.engines.decode_loop import Command, DecodeLoop

logger = logging.getLogger(__name__)


class HFEngine:
    name = "hf"

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        if config.rollout.engine_args:
            raise UserError(
                f"rollout.engine_args has {sorted(config.rollout.engine_args)}, but the hf engine takes no arguments. "
                "Leave them out"
            )
        self._config = config
        self._placeholder_ids = processor.placeholder_ids
        self._device = resolve_device(config.rollout.device)
        self._adapter = resolve_adapter(config.model)
        self._loop: DecodeLoop | None = None

    # --- life cycle -------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        self._loop = DecodeLoop(
            lambda: DecodeBatch(self._model, self._placeholder_ids, self._device),
            self._config.rollout.max_concurrent_sequences,
        )

    def _load(self) -> None:
        self._model: Any = load_model(self._config.model, device=self._device).eval().requires_grad_(False)
        if self._adapter is not None:
            add_adapter(self._model, self._adapter)
            self._model.requires_grad_(False)
        self._fingerprint = architecture_fingerprint(self._model, self._adapter)

    async def close(self) -> None:
        if self._loop is not None:
            await asyncio.to_thread(self._loop.close)

    @property
    def _decoding(self) -> DecodeLoop:
        assert self._loop is not None, "start() comes first"
        return self._loop

    @property
    def architecture_fingerprint(self) -> str:
        return self._fingerprint

    @property
    def version(self) -> int:
        return self._decoding.version

    @property
    def usage(self) -> EngineUsage:
        return self._decoding.usage

    # --- sampling ---------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            self._check(request)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Completion | Exception] = asyncio.Queue()

        def deliver(item: Completion | Exception) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        submitted = self._decoding.submit(requests, deliver)
        awaited = sum(request.group_size for request in requests)
        try:
            while awaited:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                awaited -= 1
                yield item
        finally:
            if awaited:
                self._decoding.abandon(submitted)

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

    async def pause(self) -> None:
        self._decoding.pause()

    async def resume(self) -> None:
        self._decoding.resume()

    # --- weights ----------------------------------------------------------------------------

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """With `drain` this waits for the running sequences, and nothing new starts until then."""
        drains = self._config.rollout.weight_update == "drain"
        await self._between_steps(lambda: self._swap(version, tensors), drains=drains)

    def _swap(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What runs goes on with the new weights, on its old key-value cache or on a rebuilt one."""
        decoding = self._decoding
        started, running = time.monotonic(), bool(decoding.batch.rows)
        try:
            load_published(self._model, tensors)
        except Exception as error:
            decoding.fail_running(error, for_good=True)  # the model may hold tensors of two versions
            raise
        decoding.version = version
        if running and self._config.rollout.weight_update == "recompute":
            try:
                decoding.batch.rebuild_cache(version)
            except Exception as error:  # the weights are in place; only what was running is lost
                logger.exception("rebuilding the key-value cache failed")
                decoding.fail_running(error)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if running:
            decoding.update_pause_s += time.monotonic() - started

    async def sleep(self) -> None:
        """Finish what runs, then move the weights to host memory."""
        await self._between_steps(lambda: self._move(torch.device("cpu"), asleep=True), drains=True)

    async def wake(self) -> None:
        await self._between_steps(lambda: self._move(self._device, asleep=False), drains=False)

    def _move(self, device: torch.device, *, asleep: bool) -> None:
        self._model.to(device)
        self._decoding.asleep = asleep
        if asleep and self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def _between_steps(self, run: Callable[[], None], *, drains: bool) -> None:
        """Have the decode thread call `run` between two decode steps, or when no sequence is running."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not finished.done():
                finished.set_exception(error) if error else finished.set_result(None)

        def done(error: Exception | None) -> None:
            loop.call_soon_threadsafe(settle, error)

        self._decoding.order(Command(run, done, drains))
        await finished
