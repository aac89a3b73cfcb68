"""The SGLang engine: `launch_server` in processes and an environment of its own, spoken to over `/generate`.

New weights reach running sequences between two tokens: they are retracted, and their caches computed again
(docs/decisions/023-sglang-engine.md).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from prometheus_client import REGISTRY
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device
from asyncrl.devices.sleeping import check_wake_parity, fixed_tokens
from asyncrl.errors import BadStateError
from asyncrl.launch.ports import free_port
from asyncrl.model_files.folder import model_folder, read_config
from asyncrl.models.lora import folder_fingerprint
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.sglang.arguments import (
    as_flags,
    image_size_of,
    served_folder,
    server_arguments,
    server_environment,
)
from asyncrl_plugins.sglang.client import SGLangClient, SGLangRefused
from asyncrl_plugins.sglang.conversion import check_request, generate_body, to_completion
from asyncrl_plugins.sglang.environment import python_of
from asyncrl_plugins.sglang.plugin import SGLangConfig
from asyncrl_plugins.sglang.process import LOOPBACK, SGLangProcess
from asyncrl_plugins.sglang.usage import UsageMeter
from asyncrl_plugins.sglang.weights import VersionFolders
from protocol.device_lock import use_device_for
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcesses
from rollout_server.engines.base import Completion, EngineDied, EngineUsage, FailedRequest, GenerationRequest
from rollout_server.engines.sequences import Begun, RunningSequences, completions

OWNER = "the sglang engine"
SCRAPE_S = 2.0


class SGLangEngine:
    name = "sglang"
    takes_pixels = False

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        self._config = config
        self._processor = processor
        self._device = resolve_device(config.rollout.device, "rollout.device")
        self._limit = config.data.max_prompt_length + config.longest_completion
        self._command_s = config.network.timeout_s
        self.processes: ModelProcesses | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._process: SGLangProcess | None = None
        self._client: SGLangClient | None = None
        self._metrics: _ServerMetrics | None = None
        self._version = 0
        self._meter = UsageMeter()
        self._sequences = RunningSequences()
        self._is_asleep = False
        """True while it sleeps or falls asleep: it takes no requests."""
        self._forgets = False
        """True from a sleep at level 2 until new weights have come."""
        self._before: torch.Tensor | None = None
        """[T - 1] log-probs of the fixed tokens before its last sleep; None at level 2."""
        self._failure: Exception | None = None
        """The reason for which this engine can sample no more."""
        self._control = asyncio.Condition()
        """Held during updates, sleep and wake, which come one after another; requests come after them."""

    # --- life cycle -------------------------------------------------------------------------

    async def start(self) -> None:
        model, folder = self._config.model, model_folder(self._config.model)
        self._fingerprint = await asyncio.to_thread(folder_fingerprint, model)
        self._folders = await asyncio.to_thread(VersionFolders, model)
        self._scratch = tempfile.TemporaryDirectory(prefix="asyncrl-sglang-")
        port = free_port()
        arguments = server_arguments(
            self._config,
            served_folder(folder, read_config(model), Path(self._scratch.name)),
            port,
            device=self._device,
            image_size=image_size_of(self._processor),
            text_config=self._folders.text_config,
        )
        self._process = SGLangProcess(python_of(self._config.rollout.settings_of(SGLangConfig)), port)
        environment = server_environment(self._config, cuda=self._device.type == "cuda")
        await self._process.start(as_flags(arguments), environment)
        if self._config.trainer.mode == "sync":
            use_device_for(os.getpid(), self._config.run_path, self._process.pid)
        await self._process.wait_for_answer(self._config.start_timeout_s)
        self._client = SGLangClient(self._process)
        self._metrics = _ServerMetrics(self._process.url)
        REGISTRY.register(self._metrics)

    async def close(self) -> None:
        if self._metrics is not None:
            REGISTRY.unregister(self._metrics)
            self._metrics = None
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.stop()  # one whose start was interrupted, too
        if self._scratch is not None:
            self._scratch.cleanup()
        self._process = self._client = self._scratch = None

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
            raise EngineDied(f"{OWNER} has stopped: {self._failure}") from self._failure
        if self._process is not None and self._process.problem:
            raise EngineDied(self._process.problem)

    @property
    def _calls(self) -> SGLangClient:
        assert self._client is not None, "start() comes first"
        return self._client

    # --- sampling ---------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        failed: list[FailedRequest] = []
        for request in requests:
            try:
                check_request(request, self._processor.placeholder_ids, self._limit)
            except Exception as error:
                failed.append(FailedRequest(request.request_id, error, request.stream))
        for one in failed:
            yield one
        wrong = {(one.request_id, one.stream) for one in failed}
        async with self._control:
            await self._control.wait_for(lambda: self._failure or not (self._is_asleep or self._forgets))
        self.check_alive()
        right = (request for request in requests if (request.request_id, request.stream) not in wrong)
        async with aclosing(completions(right, self._version, self._begin)) as items:
            async for item in items:
                yield item

    def _begin(self, request: GenerationRequest, index: int) -> Begun:
        rid = self._sequences.begin(request, index)
        self._meter.begin(rid)
        task = asyncio.create_task(self._complete_or_fail(request, index, rid))
        task.add_done_callback(lambda _: self._end(request, rid))
        return task

    def _end(self, request: GenerationRequest, rid: str) -> None:
        self._meter.end(rid)
        self._sequences.end(request, rid)

    async def interrupt(self, request_ids: Collection[int]) -> None:
        async def abort(rids: list[str]) -> None:
            await asyncio.gather(*map(self._abort, rids))

        await self._sequences.interrupt(request_ids, abort)

    async def _abort(self, rid: str) -> None:
        await self._calls.call("/abort_request", {"rid": rid}, timeout_s=self._command_s)

    async def _complete_or_fail(self, request: GenerationRequest, index: int, rid: str) -> Completion | FailedRequest:
        try:
            return await self._complete(request, index, rid)
        except EngineDied:
            raise
        except Exception as error:
            self.check_alive()  # an update that failed has ended it
            return FailedRequest(request.request_id, error, request.stream)

    async def _complete(self, request: GenerationRequest, index: int, rid: str) -> Completion:
        """One completion as a request of its own: a short one need not wait for the rest of its group."""
        version = self._version
        try:
            answer = await self._calls.call("/generate", generate_body(request, index, rid), timeout_s=None)
        except asyncio.CancelledError:
            with suppress(EngineDied, SGLangRefused):
                await self._abort(rid)
            raise
        except SGLangRefused:
            if not self._sequences.was_interrupted(rid):
                raise
            return request.begun(index, version)
        was_interrupted = self._sequences.was_interrupted(rid)
        if was_interrupted and not answer["output_ids"]:
            return request.begun(index, version)
        completion = to_completion(request, index, answer, version, was_interrupted=was_interrupted)
        self._meter.sampled(len(answer["output_ids"]))
        return completion

    # --- weights ----------------------------------------------------------------------------

    async def update_weights(self, version: int, weights: ArrivedWeights, /) -> None:
        """Load a version. With `drain` this waits for the running sequences, and nothing new starts until then."""
        async with self._in_control():
            self.check_alive()
            self._refuse_if_asleep("takes new weights")
            async with self._folders.written(weights) as folder:
                if self._config.rollout.weight_update == "drain":
                    await self._meter.idle.wait()
                try:
                    await self._swap(version, folder)
                except BaseException as error:
                    await self._fail(error)
                    raise

    async def _swap(self, version: int, folder: Path) -> None:
        await self._calls.call("/pause_generation", {"mode": "retract"}, timeout_s=self._command_s)
        self._meter.update_begins()
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": True,  # else prompts would go on from prefixes that old weights have computed
        }
        await self._calls.command("/update_weights_from_disk", body, timeout_s=self._config.start_timeout_s)
        self._version = version
        self._forgets = False
        await self._calls.call("/continue_generation", timeout_s=self._command_s)
        self._meter.update_ends()

    async def _fail(self, error: BaseException) -> None:
        """Stop sampling for good, since the model may hold tensors of two versions, and end what is in work."""
        self._failure = error if isinstance(error, Exception) else BadStateError("a weight update was interrupted")
        with suppress(EngineDied, SGLangRefused):
            await self._calls.call("/abort_request", {"abort_all": True}, timeout_s=self._command_s)
            await self._calls.call("/continue_generation", timeout_s=self._command_s)

    # --- sleep ------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Finish what runs, then give memory away as rollout.sleep_level says; requests wait until `wake`.

        On a CPU SGLang frees nothing.
        """
        async with self._in_control():
            self.check_alive()
            self._refuse_if_asleep("falls asleep")
            self._is_asleep = True
            await self._meter.idle.wait()
            self._forgets = self._config.rollout.sleep_level == 2
            self._before = None if self._forgets else await self._fixed_logprobs()
            free = self._free_bytes()
            await self._calls.call("/release_memory_occupation", timeout_s=self._config.start_timeout_s)
            self._meter.sleep_bytes = max(0, self._free_bytes() - free)

    async def wake(self) -> None:
        """Wake SGLang; after level 2 it samples nothing before an update. Raises BadStateError for a damaged model."""
        async with self._in_control():
            if not self._is_asleep:
                return
            try:
                await self._calls.call("/resume_memory_occupation", timeout_s=self._config.start_timeout_s)
                await self._calls.call("/flush_cache", timeout_s=self._command_s)
                if self._before is not None:
                    check_wake_parity(OWNER, self._before, await self._fixed_logprobs(), self._device)
            except (BadStateError, SGLangRefused) as error:
                await self._fail(error)
                raise
            self._is_asleep = False

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0

    async def _fixed_logprobs(self) -> torch.Tensor:
        """[T - 1] log-probs of the fixed tokens, all of them computed anew."""
        ids = fixed_tokens(self._folders.text_config.vocab_size, self._processor.placeholder_ids).tolist()
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._calls.call("/generate", body, timeout_s=self._config.start_timeout_s)
        return torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]])

    @asynccontextmanager
    async def _in_control(self) -> AsyncIterator[None]:
        async with self._control:
            try:
                yield
            finally:
                self._control.notify_all()

    def _refuse_if_asleep(self, before: str) -> None:
        if self._is_asleep:
            raise BadStateError(f"{OWNER} is asleep: wake it before it {before}")


class _ServerMetrics(Collector):
    """SGLang's own metrics, read from it at each scrape of ours."""

    def __init__(self, url: str):
        self.__url = f"{url}/metrics"

    def describe(self) -> Sequence[Family]:
        return ()  # else it were asked when it is registered

    def collect(self) -> Iterator[Family]:
        with suppress(OSError, ValueError), LOOPBACK.open(self.__url, timeout=SCRAPE_S) as answer:
            yield from text_string_to_metric_families(answer.read().decode())
