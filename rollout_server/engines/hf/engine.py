"""The embedded engine: transformers on CPU or GPU, sequences joining and leaving one decode batch.

New weights are taken up between two decode steps; `rollout.weight_update` decides what becomes of the sequences
that are running (docs/decisions/006-in-flight-updates.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import torch

from asyncrl.config.parts import ROLLOUT_WEIGHTS
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device
from asyncrl.devices.sleeping import Sleeper, bit_sums, check_wake_parity, fixed_tokens
from asyncrl.errors import BadStateError, UserError
from asyncrl.models.loading import load_model
from asyncrl.models.lora import add_adapter, resolve_adapter
from asyncrl.models.published import architecture_fingerprint, load_published, published_parts, published_tensors
from asyncrl.models.small_copy import family_of
from asyncrl.models.token_trace import token_traces
from asyncrl.plugins import descriptions, implementation
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from rollout_server.engines.arrived_weights import ModelProcesses, ThisProcess
from rollout_server.engines.base import Completion, EngineUsage, FailedRequest, GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, prefill
from rollout_server.engines.hf.decode_check import check_decoding
from rollout_server.engines.hf.decode_loop import DecodeLoop
from rollout_server.engines.hf.grouped_attention import for_decoding

logger = logging.getLogger(__name__)

OWNER = "the hf engine"
Rounding = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]]


class HFEngine:
    name = "hf"
    takes_pixels = True

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        self._config = config
        self._placeholder_ids = processor.placeholder_ids
        self._device = resolve_device(config.rollout.device, "rollout.device")
        self._adapter = resolve_adapter(config.model)
        self.processes: ModelProcesses | None = ThisProcess(self._device)
        self._loop: DecodeLoop | None = None
        self._sleeper = Sleeper(OWNER, self._device, config.run_path)
        self._round: Rounding | None = None
        """Function from published weights to those of lower precision (`RolloutConfig.precision`)."""
        self._forgets = False
        """True from a sleep that keeps no weights until new ones have come."""

    # --- life cycle -------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        self._loop = DecodeLoop(self._make_batch, self._config.rollout.max_concurrent_sequences)
        self._loop.start()

    def _load(self) -> None:
        groups_queries = check_decoding(self._config.model)
        attention = family_of(self._config.model).attention
        model = load_model(self._config.model, device=self._device, text_attention=attention)
        self._model: Any = for_decoding(model.eval().requires_grad_(False), groups_queries=groups_queries)
        if weights := ROLLOUT_WEIGHTS.find(self._config.rollout.precision(self._config.model.quantization)):
            self._round = implementation(weights.implementation)(self._model)
        if self._adapter is not None:
            add_adapter(self._model, self._adapter)
            self._model.requires_grad_(False)
        self._fingerprint = architecture_fingerprint(self._model, self._adapter)
        traces = token_traces(self._config.algorithm, self._config.model)
        recorders = {name: trace.record(self._model) for name, trace in traces.items()}
        batch, parts = (self._model, self._placeholder_ids, self._device, recorders), descriptions("decode_batches")
        makers = (implementation(part.implementation)(self._config, *batch) for part in parts.values())
        self._make_batch: Callable[[], DecodeBatch] = next(filter(None, makers), partial(DecodeBatch, *batch))
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        self._fixed_tokens = fixed_tokens(vocabulary, self._placeholder_ids)

    async def close(self) -> None:
        if self._loop is not None:
            await self._loop.close()

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

    def check_alive(self) -> None:
        self._decoding.check_alive()

    # --- sampling ---------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        admitted: list[GenerationRequest] = []
        for request in requests:
            try:
                self._check(request)
                admitted.append(request)
            except UserError as error:
                yield FailedRequest(request.request_id, error, request.stream)
        async with aclosing(self._decoding.generate(admitted)) as completions:
            async for completion in completions:
                yield completion

    def _check(self, request: GenerationRequest) -> None:
        """Raise UserError for a request that cannot be sampled as its ticket asks."""
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

    async def interrupt(self, request_ids: Collection[int]) -> None:
        await self._decoding.interrupt(request_ids)

    # --- weights ----------------------------------------------------------------------------

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a version. Running sequences are finished first (`drain`), or go on with it: on their old key-value
        cache (`keep`), or on a rebuilt one (`recompute`)."""
        decoding, mode = self._decoding, self._config.rollout.weight_update
        async with decoding.between_steps(drains=mode == "drain"):
            self._sleeper.check_awake()
            started, running = time.monotonic(), bool(decoding.batch.rows)
            try:
                await decoding.on_thread(self._load_weights, tensors)
            except BaseException as error:  # the model may hold tensors of two versions
                interrupted = BadStateError("a weight update was interrupted")
                decoding.end(error if isinstance(error, Exception) else interrupted)
                raise
            decoding.version = version
            decoding.asleep = self._forgets = False
            if running and mode == "recompute":
                try:
                    await decoding.on_thread(decoding.batch.rebuild_cache)
                except Exception as error:  # the weights are in place; only what was running is lost
                    logger.exception("rebuilding the key-value cache failed")
                    decoding.fail_running(error)
            if self._device.type == "cuda":
                await decoding.on_thread(torch.cuda.synchronize, self._device)
            if running:
                decoding.update_pause_s += time.monotonic() - started

    def _load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into the model, rounded where they are quantised. After a sleep that kept none, compare bit sums
        of copies and originals."""
        if self._round is not None:
            tensors = self._round(tensors)
        if not self._forgets:
            load_published(self._model, tensors)
            return
        published: dict[str, int] = {}
        loaded: dict[str, int] = {}
        load_published(self._model, bit_sums(tensors, published))
        for _ in bit_sums(published_tensors(self._model), loaded):
            pass
        wrong = [name for name, bit_sum in loaded.items() if bit_sum != published[name]]
        if wrong:
            raise BadStateError(
                f"{OWNER} woke up damaged: {len(wrong)} of {len(loaded)} tensors are not those that were published, "
                f"such as {wrong[0]} (bit sum {loaded[wrong[0]]}, published {published[wrong[0]]})"
            )

    # --- sleep ------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Finish what runs, then take the weights off the device: see rollout.sleep_level."""
        async with self._decoding.between_steps(drains=True):
            await self._decoding.on_thread(self._fall_asleep)

    async def wake(self) -> None:
        """Bring the model back. At level 2 nothing is sampled before weights have come."""
        async with self._decoding.between_steps(drains=False):
            await self._decoding.on_thread(self._wake_up)

    def _fall_asleep(self) -> None:
        self._sleeper.check_awake()
        self._decoding.batch = self._make_batch()  # the old one, which is empty, may keep memory
        self._forgets = self._config.rollout.sleep_level == 2
        tensors = (tensor for part in (self._model.parameters(), self._model.buffers()) for tensor in part)
        # What is not published must be kept: no update would bring it.
        forgotten = (tensor for _, tensor in published_parts(self._model)) if self._forgets else ()
        if not self._forgets:
            self._before = self._fixed_logprobs()
        self._decoding.sleep_bytes = self._sleeper.sleep(tensors, forget=forgotten)
        self._decoding.asleep = True

    def _wake_up(self) -> None:
        if not self._sleeper.is_asleep:
            return
        self._sleeper.wake()
        if not self._forgets:
            check_wake_parity(OWNER, self._before, self._fixed_logprobs(), self._device)
            self._decoding.asleep = False

    @torch.inference_mode()
    def _fixed_logprobs(self) -> torch.Tensor:
        """[T] fp32 on the CPU, of each fixed token after all of them."""
        ids = self._fixed_tokens
        logits = prefill(self._model, [EncodedPrompt.of_text(ids)], self._device).logits[0]
        return logits.float().log_softmax(-1)[torch.from_numpy(ids).long().to(self._device)].cpu()
