"""The vLLM engine: an `AsyncLLM` in this process, its core and workers in processes of their own.

Weights are swapped under running sequences through vLLM's weight-transfer API (docs/decisions/008-vllm-engine.md).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.adapter_targets import resolve_adapter
from asyncrl.models.loading import folder_fingerprint, model_folder
from asyncrl.models.processing import PromptProcessor
from rollout_server.engines.base import ArrivedWeights, Completion, EngineUsage, GenerationRequest
from rollout_server.engines.vllm_engine.adapter import adapter_folder, slot_arguments
from rollout_server.engines.vllm_engine.library import import_vllm
from rollout_server.engines.vllm_engine.outputs import to_completion
from rollout_server.engines.vllm_engine.probe import check_probe, probe
from rollout_server.engines.vllm_engine.requests import check_request, sampling_params, to_engine_input
from rollout_server.engines.vllm_engine.settings import (
    check_heads,
    check_known,
    check_settings,
    engine_arguments,
    engine_environment,
    on_cuda,
)
from rollout_server.engines.vllm_engine.staging import WorkerStaging
from rollout_server.engines.vllm_engine.transfer import BACKEND, vision_entries, weight_update
from rollout_server.engines.vllm_engine.usage import UsageMeter
from rollout_server.engines.vllm_engine.versions import check_installed
from rollout_server.staging import Staging

logger = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""What vLLM's processes get to end in order; then they are killed."""


class VLLMEngine:
    name = "vllm"

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        """Raises UserError for whatever is known to go wrong before vLLM is even imported."""
        self._cuda = on_cuda(config)
        check_settings(config, cuda=self._cuda)
        check_installed(cuda=self._cuda)
        self._adapter = resolve_adapter(config.model)
        self._adapter_request: Any = None
        """vLLM's name of the adapter that new requests are sampled with; None: the model's own weights."""
        self._config = config
        self._processor = processor
        self.staging: Staging | None = None
        self._llm: Any = None
        self._starting: asyncio.Future[Any] | None = None
        self._version = 0
        self._vision: frozenset[tuple[str, int]] | None = None
        """Names and checksums of the vision part's tensors that made what is in the encoder cache."""
        self._meter = UsageMeter()
        self._numbers = itertools.count()
        self._running: set[str] = set()
        """vLLM's ids of the requests that are in work."""
        self._paused = False
        self._asleep = False
        self._forgets = False
        """It sleeps, or slept last, at level 2, and the next weights have not come."""
        self._idle = asyncio.Event()
        self._idle.set()
        """No request is in work."""
        self._failure: Exception | None = None
        """Why this engine can sample no more."""
        self._control = asyncio.Lock()
        """Held by whoever pauses vLLM for something: updates, sleep and wake come one after another."""
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start_vllm))
        self._llm = await asyncio.shield(self._starting)
        await self._llm.update_weight_version(str(self._version))
        receivers = self._llm.vllm_config.parallel_config.world_size
        self.staging = WorkerStaging(self._llm, self._vllm, receivers, self._at_rest)

    def _start_vllm(self) -> Any:
        from transformers import AutoConfig

        config = self._config
        self._fingerprint = folder_fingerprint(config.model)
        hf_config = AutoConfig.from_pretrained(
            model_folder(config.model), trust_remote_code=config.model.trust_remote_code
        )
        text_config = hf_config.get_text_config()
        with engine_environment(config, cuda=self._cuda):
            vllm = import_vllm()
            if not self._cuda:
                check_heads(text_config, vllm.cpu_head_sizes)
            check_known(config.rollout.engine_args, vllm.argument_names)
            arguments = engine_arguments(
                config, cuda=self._cuda, text_config=text_config, banned=list(self._processor.placeholder_ids)
            )
            if self._adapter is not None:
                arguments |= slot_arguments(self._adapter)
            logger.info("starting vLLM %s with %s", vllm.version, arguments)
            transfer = None if self._adapter else vllm.WeightTransferConfig(backend=BACKEND)
            llm = vllm.AsyncEngine.from_engine_args(
                vllm.AsyncEngineArgs(**arguments, weight_transfer_config=transfer),
                stat_loggers=cast(Any, [lambda _config, _index=0: self._meter]),
            )
        self._vllm = vllm
        return llm

    async def close(self) -> None:
        if self._starting is None:
            return
        try:
            llm = await self._starting  # a start that was interrupted has processes, too
        except Exception:
            return  # start() has raised it
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would report this end as a failure
        await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
        self._llm = self._starting = None

    @property
    def architecture_fingerprint(self) -> str:
        return self._fingerprint

    @property
    def version(self) -> int:
        return self._version

    @property
    def usage(self) -> EngineUsage:
        return self._meter.usage

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            check_request(request, self._processor.placeholder_ids, self._llm.vllm_config.model_config.max_model_len)
        inputs = await asyncio.gather(*(to_engine_input(request, self._llm, self._vllm) for request in requests))
        await self._until(lambda: not self._asleep and not self._forgets, "for the engine to wake up and have weights")
        self._refuse_if_failed()
        tasks = [
            asyncio.create_task(self._complete(request, index, engine_input))
            for request, engine_input in zip(requests, inputs, strict=True)
            for index in range(request.group_size)
        ]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # vLLM hears of it before we are done

    async def _complete(self, request: GenerationRequest, index: int, engine_input: Any) -> Completion:
        """One completion as a request of its own: a short one need not wait for the rest of its group.

        vLLM computes the group's prompt once, as it does for its own `n`: prefix cache and encoder cache have it.
        """
        number = f"{request.request_id}-{index}-{next(self._numbers)}"
        submitted_version = self._version
        # Blocks of the prefix cache are found only by requests of the same version: with weight_update=keep they
        # cannot be dropped while a sequence runs.
        salted = {**engine_input, "cache_salt": f"version {submitted_version}"}
        params = sampling_params(request, index, self._vllm)
        last: Any = None
        self._meter.begin()
        self._running.add(number)
        self._idle.clear()
        try:
            async for answer in self._llm.generate(salted, params, number, lora_request=self._adapter_request):
                last = answer
        except self._vllm.EngineDeadError as error:
            raise BadStateError("vLLM's engine process has died; what it said last is in the server's log") from error
        finally:
            self._running.discard(number)
            if not self._running:
                self._idle.set()
            self._meter.end()
        output = last.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            self._refuse_if_failed()
            raise BadStateError(f"vLLM ended ticket {request.request_id} with {output.finish_reason!r}")
        keeps = self._config.rollout.weight_update == "keep"
        return to_completion(request, index, output, submitted_version if keeps else None)

    async def pause(self) -> None:
        async with self._control:
            self._paused = True
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        async with self._control:
            self._paused = False
            if not self._asleep:
                await self._llm.resume_generation()

    async def sleep(self) -> None:
        """Finish what runs, then give memory away as rollout.sleep_level says; requests wait until `wake`.

        On a CPU vLLM changes its state only: no memory is freed there. Whoever calls vLLM's own `generate` while it
        sleeps waits for ever.
        """
        async with self._control:
            self._refuse_if_failed()
            self._refuse_if_asleep("falls asleep")
            self._refuse_to_wait_for_paused()
            self._asleep = True
            await self._idle.wait()
            level = self._config.rollout.sleep_level
            self._forgets = level == 2
            if not self._forgets:
                self._before = await probe(self._llm, self._vllm, self._processor.placeholder_ids)
            await self._llm.sleep(level=level, mode="wait")

    async def wake(self) -> None:
        """After level 2 nothing is sampled before the next update. Raises BadStateError for a damaged model."""
        async with self._control:
            if not self._asleep:
                return
            await self._llm.wake_up()
            if not self._forgets:
                try:
                    after = await probe(self._llm, self._vllm, self._processor.placeholder_ids)
                    check_probe(self._before, after, self._config.model.dtype)
                except BadStateError as error:
                    await self._fail(error)
                    raise
            self._asleep = False
            if self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._tell()

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[None]:
        """Nothing is computed meanwhile, for an update that is to come."""
        async with self._control:
            self._refuse_if_asleep("takes new weights")
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._meter.update_begins()
            try:
                yield
            finally:
                if not self._paused:
                    await self._llm.resume_generation()
                self._meter.update_ends()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _refuse_if_asleep(self, before: str) -> None:
        if self._asleep:
            raise BadStateError(f"the vllm engine is asleep: wake it before it {before}")

    def _refuse_to_wait_for_paused(self) -> None:
        if self._paused and self._running:
            raise BadStateError(
                f"{len(self._running)} sequences cannot finish while the engine is paused: resume it first"
            )

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = self._config.learner.wait_timeout_s
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise BadStateError(f"waited {deadline_s:g} s (learner.wait_timeout_s) {what}") from None

    async def update_weights(self, version: int, weights: ArrivedWeights, /) -> None:
        """With `drain` this waits for the running sequences, and nothing new starts until then."""
        async with self._control:
            self._refuse_if_failed()
            self._refuse_if_asleep("takes new weights")
            drains = self._config.rollout.weight_update == "drain"
            if drains:
                self._refuse_to_wait_for_paused()
            await self._llm.pause_generation(mode="wait" if drains else "keep", clear_cache=False)
            self._meter.update_begins()
            try:
                await self._swap(version, weights)
            except BaseException as error:
                await self._fail(error)
                raise
            self._version = version
            self._forgets = False
            if not self._paused:
                await self._llm.resume_generation()
            self._meter.update_ends()
        await self._tell()

    async def _swap(self, version: int, weights: ArrivedWeights) -> None:
        """vLLM stands still meanwhile, and so the versions that it stamps are exact."""
        if self._adapter is None:
            await self._llm.start_weight_update()
            await self._llm.update_weights(self._vllm.WeightTransferUpdateRequest(weight_update(weights)))
            await self._llm.finish_weight_update(str(version))
        else:
            with adapter_folder(version, weights, self._vllm) as (told, carried):
                await self._llm.add_lora(told)
            await self._llm.update_weight_version(str(version))
            self._adapter_request = carried
        if self._config.rollout.weight_update != "keep":
            # Of running sequences, too: they are queued again and their prompts and tokens computed anew.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        vision = vision_entries(weights.manifest)
        if vision != self._vision:
            await self._llm.reset_encoder_cache()
        self._vision = vision

    async def _fail(self, error: BaseException) -> None:
        """The model may hold tensors of two versions: it samples no more, and who waits is told."""
        self._failure = error if isinstance(error, Exception) else BadStateError("a weight update was interrupted")
        try:
            await self._llm.abort(list(self._running))
        except self._vllm.EngineDeadError:
            logger.warning("vLLM's engine process has died in the update")

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise BadStateError(f"the vllm engine has stopped: {self._failure}") from self._failure
