"""The vLLM engine: an `AsyncLLM` in this process, its core and workers in processes of their own.

Weights are swapped under running sequences through vLLM's weight-transfer API (docs/decisions/008-vllm-engine.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device
from asyncrl.errors import BadStateError, UserError
from asyncrl.models.lora import folder_fingerprint, resolve_adapter
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.vllm.conversion import (
    ABORTED,
    check_request,
    sampling_params,
    to_completion,
    to_engine_input,
)
from asyncrl_plugins.vllm.sent_media import MISSED, submissions
from asyncrl_plugins.vllm.sleep import Asleep, fall_asleep, wake_up
from asyncrl_plugins.vllm.start import (
    DEAD,
    await_or_engine_death,
    engine_death_translated,
    say_while_starting,
    start_vllm,
)
from asyncrl_plugins.vllm.usage import UsageMeter
from asyncrl_plugins.vllm.weights import (
    WorkerProcesses,
    check_slot,
    fill_slot,
    no_adapter,
    vision_entries,
    weight_update,
)
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcesses
from rollout_server.engines.base import Completion, EngineDied, EngineUsage, FailedRequest, GenerationRequest
from rollout_server.engines.sequences import Begun, RunningSequences, completions

SHUTDOWN_S = 10.0
"""Time for vLLM's processes to end in order; then they are killed."""


class VLLMEngine:
    name = "vllm"
    takes_pixels = False

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        self._cuda = resolve_device(config.rollout.device, "rollout.device").type == "cuda"
        self._adapter = resolve_adapter(config.model)
        self._adapter_request: Any = None
        """Adapter that new requests are sampled with, as vLLM knows it; None: the model itself is trained."""
        self._config = config
        self._processor = processor
        self.processes: ModelProcesses | None = None
        self._llm: Any = None
        self._starting: asyncio.Future[Any] | None = None
        self._version = 0
        self._vision: frozenset[tuple[str, int]] | None = None
        """Names and checksums of the vision part's tensors that made what is in the encoder cache."""
        self._meter = UsageMeter()
        self._sequences = RunningSequences()
        self._is_asleep = False
        """True while it sleeps or falls asleep: it takes no requests."""
        self._asleep = Asleep(None, 0)
        """State before its last sleep."""
        self._forgets = False
        """True from a sleep at level 2 until new weights have come."""
        self._failure: Exception | None = None
        """The reason for which this engine can sample no more."""
        self._control = asyncio.Condition()
        """Held while vLLM is paused for something: updates, sleep and wake come one after another, requests after
        them."""

    async def start(self) -> None:
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start_vllm))
        await say_while_starting(self._starting, self._config.start_timeout_s)
        self._llm = await asyncio.shield(self._starting)
        with engine_death_translated():
            await await_or_engine_death(self._llm, self._take_version_0())
        self.processes = WorkerProcesses(self._llm, self._at_rest)

    async def _take_version_0(self) -> None:
        if self._config.rollout.quantization and 0 in await self._llm.collective_rpc("quantized_layers"):
            raise UserError(
                f"rollout.quantization is {self._config.rollout.quantization}, and vLLM quantises no layer of "
                f"{self._config.model.path}: its names are not as expected. Set rollout.engine=hf"
            )
        if self._adapter is not None:
            none = no_adapter(self._config.model, self._adapter)
            self._adapter_request = await fill_slot(self._llm, self._adapter, 0, none.items())
            await check_slot(self._llm)
        await self._llm.update_weight_version(str(self._version))

    def _start_vllm(self) -> Any:
        self._fingerprint = folder_fingerprint(self._config.model)
        return start_vllm(self._config, self._adapter, self._processor.placeholder_ids, self._meter, cuda=self._cuda)

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

    def check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDied(f"the vllm engine has stopped: {self._failure}") from self._failure
        if self._llm.errored:  # what waits for an answer of vLLM's core then, other than a completion, waits for ever
            raise EngineDied(DEAD)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        inputs = await asyncio.gather(*(self._inputs_of(request) for request in requests))
        for failed in inputs:
            if isinstance(failed, FailedRequest):
                yield failed
        async with self._control:
            await self._control.wait_for(lambda: self._failure or not (self._is_asleep or self._forgets))
        self.check_alive()
        prepared = {
            (request.request_id, request.stream): starts
            for request, starts in zip(requests, inputs, strict=True)
            if not isinstance(starts, FailedRequest)
        }

        def begin(request: GenerationRequest, index: int) -> Begun:
            start = request.prefix(index), request.images_of(index)
            return self._begin(request, index, prepared[request.request_id, request.stream][start])

        right = (request for request in requests if (request.request_id, request.stream) in prepared)
        async with aclosing(completions(right, self._version, begin)) as items:
            async for item in items:
                yield item

    async def _inputs_of(self, request: GenerationRequest) -> Mapping[Any, Any] | FailedRequest:
        """vLLM's inputs by prefix and images of the completions that are sampled, or the reason why there are none."""
        sampled = [i for i in range(request.group_size) if request.finish_reason(request.prefix(i)) is None]
        starts = {(request.prefix(index), request.images_of(index)): index for index in sampled}
        try:
            check_request(request, self._processor.placeholder_ids, self._llm.vllm_config.model_config.max_model_len)
            return {start: await to_engine_input(request, self._llm, index) for start, index in starts.items()}
        except Exception as error:
            return FailedRequest(request.request_id, error, request.stream)

    def _begin(self, request: GenerationRequest, index: int, engine_input: Any) -> Begun:
        number = self._sequences.begin(request, index)
        self._meter.begin(number)
        task = asyncio.create_task(self._complete_or_fail(number, request, index, engine_input))
        task.add_done_callback(lambda _: self._end(number, request))
        return task

    def _end(self, number: str, request: GenerationRequest) -> None:
        self._meter.end(number)
        self._sequences.end(request, number)

    async def interrupt(self, request_ids: Collection[int]) -> None:
        with engine_death_translated():
            await self._sequences.interrupt(request_ids, self._llm.abort)

    async def _complete_or_fail(
        self, number: str, request: GenerationRequest, index: int, engine_input: Any
    ) -> Completion | FailedRequest:
        try:
            return await self._complete(number, request, index, engine_input)
        except EngineDied:
            raise
        except Exception as error:
            return FailedRequest(request.request_id, error, request.stream)

    async def _complete(self, number: str, request: GenerationRequest, index: int, engine_input: Any) -> Completion:
        """One completion as a request of its own: a short one need not wait for the rest of its group.

        vLLM gets the group's images once and computes its prompt once, as it does for its own `n`: its core keeps the
        images, prefix cache and encoder cache have the prompt.
        """
        for given in submissions(self._llm, engine_input):
            if (done := await self._submit(number, request, index, given)) is not None:
                return done
        self.check_alive()
        raise BadStateError(f"vLLM ended ticket {request.request_id} with {MISSED!r}")

    async def _submit(self, number: str, request: GenerationRequest, index: int, given: Any) -> Completion | None:
        """A completion; None where vLLM's core says MISSED, before it has sampled anything."""
        submitted_version = self._version
        # Blocks of the prefix cache are found only by requests of the same version: with weight_update=keep they
        # cannot be dropped while a sequence runs.
        salted = {**given, "cache_salt": f"version {submitted_version}"}
        params = sampling_params(request, index)
        last: Any = None
        with engine_death_translated():
            async for answer in self._llm.generate(salted, params, number, lora_request=self._adapter_request):
                last = answer
        output = last.outputs[0]
        if output.finish_reason == MISSED:
            return None
        was_interrupted = output.finish_reason == ABORTED and self._sequences.was_interrupted(number)
        if output.finish_reason not in ("stop", "length") and not was_interrupted:
            self.check_alive()
            raise BadStateError(f"vLLM ended ticket {request.request_id} with {output.finish_reason!r}")
        return to_completion(request, index, output, submitted_version)

    async def sleep(self) -> None:
        """Finish what runs, then give memory away as rollout.sleep_level says; requests wait until `wake`.

        On a CPU vLLM changes its state only: no memory is freed there. A call of vLLM's own `generate` while it
        sleeps waits for ever.
        """
        async with self._in_control():
            self.check_alive()
            self._refuse_if_asleep("falls asleep")
            self._is_asleep = True
            await self._meter.idle.wait()
            level = self._config.rollout.sleep_level
            self._forgets = level == 2
            self._asleep = await fall_asleep(self._llm, level, self._processor.placeholder_ids)
            self._meter.sleep_bytes = self._asleep.freed_bytes

    async def wake(self) -> None:
        """Wake vLLM; after level 2 it samples nothing before an update. Raises BadStateError for a damaged model."""
        async with self._in_control():
            if not self._is_asleep:
                return
            device = torch.device("cuda" if self._cuda else "cpu")
            try:
                await wake_up(self._llm, self._asleep, self._processor.placeholder_ids, device)
            except BadStateError as error:
                await self._fail(error)
                raise
            self._is_asleep = False

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[None]:
        """Block in which vLLM computes nothing, for an update that is to come."""
        async with self._in_control():
            self._refuse_if_asleep("takes new weights")
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._meter.update_begins()
            try:
                yield
            finally:
                await self._llm.resume_generation()
                self._meter.update_ends()

    @asynccontextmanager
    async def _in_control(self) -> AsyncIterator[None]:
        async with self._control:
            try:
                with engine_death_translated():
                    yield
            finally:
                self._control.notify_all()

    def _refuse_if_asleep(self, before: str) -> None:
        if self._is_asleep:
            raise BadStateError(f"the vllm engine is asleep: wake it before it {before}")

    async def update_weights(self, version: int, weights: ArrivedWeights, /) -> None:
        """Load a version. With `drain` this waits for the running sequences, and nothing new starts until then."""
        async with self._in_control():
            self.check_alive()
            self._refuse_if_asleep("takes new weights")
            drains = self._config.rollout.weight_update == "drain"
            await self._llm.pause_generation(mode="wait" if drains else "keep", clear_cache=False)
            self._meter.update_begins()
            try:
                await self._swap(version, weights)
            except BaseException as error:
                await self._fail(error)
                raise
            self._version = version
            self._forgets = False
            await self._llm.resume_generation()
            self._meter.update_ends()

    async def _swap(self, version: int, weights: ArrivedWeights) -> None:
        """Load a version while vLLM stands still, so that the versions that it stamps are exact."""
        if self._adapter is None:
            from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
                WeightTransferUpdateRequest,
            )

            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(weight_update(weights)))
            await self._llm.finish_weight_update(str(version))
        else:
            self._adapter_request = await fill_slot(self._llm, self._adapter, version, weights)
            await self._llm.update_weight_version(str(version))
        if self._config.rollout.weight_update != "keep":
            # Of running sequences, too: they are queued again and their prompts and tokens computed anew.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        vision = vision_entries(weights.manifest)
        if vision != self._vision:
            await self._llm.reset_encoder_cache()
        self._vision = vision

    async def _fail(self, error: BaseException) -> None:
        """Stop sampling for good, since the model may hold tensors of two versions, and end what is in work."""
        self._failure = error if isinstance(error, Exception) else BadStateError("a weight update was interrupted")
        with suppress(EngineDied), engine_death_translated():
            await self._llm.abort(list(self._meter.in_work))
