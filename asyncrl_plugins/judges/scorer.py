"""Scorers of the reward pool: a process that computes one component for many samples at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.config.gpu_assignment import GPUS_VARIABLE, listed_gpus
from asyncrl.config.sections import RewardFunctionConfig, component_name
from asyncrl.errors import BadStateError, UserError
from asyncrl.rewards import channel
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score, request_of, scores_of
from asyncrl.rewards.worker_process import WorkerDied, WorkerProcess
from asyncrl_plugins.judges.judge_settings import JudgeSettings
from asyncrl_plugins.judges.reward_model_settings import RewardModelSettings
from asyncrl_plugins.judges.settings import settings_of

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 900.0
"""Seconds for a reward model's weights to be read and moved to its device."""
GRACE_S = 5.0
"""Seconds that a process gets beyond a sample's time limit to say by itself that it was too long."""


class ProcessScorer:
    """One process, started again when it is lost. Requests wait for one of its places in order of arrival."""

    def __init__(
        self,
        name: str,
        settings: JudgeSettings | RewardModelSettings,
        module: str,
        places: int,
        on_dropped: Callable[[int], None],
    ) -> None:
        """`places`: requests that the process has at a time."""
        self._name = name
        self._settings = settings
        self._module = module
        self._on_dropped = on_dropped
        self._places = asyncio.Semaphore(places)
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.Task[WorkerProcess] | None = None
        """Start of the newest process."""
        self._reading: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """Sums of the counts in the process's replies."""
        self._closed = False

    async def start(self) -> None:
        self._process = asyncio.create_task(self._start())
        await self._process

    async def score(
        self, samples: Sequence[RewardSample], scores: Sequence[Score], names: Sequence[str]
    ) -> list[Score]:
        request_id = next(self._ids)
        request = {"id": request_id, **request_of(samples, scores, names)}
        async with self._places:
            started = time.perf_counter()
            kind, message = "reward_timeout", f"was not done after {self._settings.timeout_s:g} s (its timeout_s)"
            process = await self._running()
            answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
            try:
                process.send(channel.pack(request))
                async with asyncio.timeout(self._settings.timeout_s + GRACE_S):
                    reply = await answer
                self.counts.update(reply.get("counts", {}))
                return scores_of(reply)
            except TimeoutError:  # it is stuck, and so is whatever else it has in work
                logger.warning("reward %s: its process is stuck, and is killed", self._name)
                await process.stop()
            except WorkerDied as died:
                kind, message = "reward_crash", f"lost its process: {died}"
            finally:
                self._answers.pop(request_id, None)
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            seconds, message = time.perf_counter() - started, f"reward component {self._name!r} {message}"
            return [score.failed(kind, message).later(seconds) for score in scores]

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.cancel()  # where it still starts
            with suppress(asyncio.CancelledError, Exception):
                await (await self._process).stop()
        if self._reading is not None:
            await self._reading

    async def _running(self) -> WorkerProcess:
        """The process, or its successor where it is lost. Raises BadStateError where there can be none."""
        assert self._process is not None, "started"
        while True:
            start = self._process
            try:
                process = await asyncio.shield(start)
            except UserError as error:
                raise BadStateError(
                    f"the lost process of reward {self._name} could not be started again: {error}"
                ) from None
            if process.alive:
                return process
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if self._process is start:
                logger.warning("reward %s lost its process; starting another", self._name)
                self._process = asyncio.create_task(self._restart(process))

    async def _restart(self, lost: WorkerProcess) -> WorkerProcess:
        await lost.stop()
        if self._reading is not None:
            await self._reading  # it fails what the lost one had in work, and nothing of its successor's
        return await self._start()

    async def _start(self) -> WorkerProcess:
        environment, changed = self._place()
        setup = channel.pack({"name": self._name, "settings": self._settings.model_dump() | changed})
        process = await WorkerProcess.start(setup, self._on_dropped, self._module, environment, LOAD_TIMEOUT_S)
        self._reading = asyncio.create_task(self._read(process))
        return process

    def _place(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Environment variables of the process, and settings that they change."""
        return {}, {}

    async def _read(self, process: WorkerProcess) -> None:
        """Hand replies to those that wait for them, until the process ends."""
        try:
            while True:
                reply = await process.receive()
                answer = self._answers.get(reply["id"])
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except WorkerDied as died:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(died)


class JudgeScorer(ProcessScorer):
    def __init__(self, component: RewardFunctionConfig, on_dropped: Callable[[int], None]) -> None:
        settings = settings_of(component, JudgeSettings)
        name, places = component_name(component), settings.concurrency
        super().__init__(name, settings, "asyncrl_plugins.judges.judge", places, on_dropped)


class RewardModelScorer(ProcessScorer):
    def __init__(self, component: RewardFunctionConfig, on_dropped: Callable[[int], None]) -> None:
        settings = settings_of(component, RewardModelSettings)
        self._device = settings.device
        name, places = component_name(component), 2 * settings.batch  # a batch that is computed, and the next
        super().__init__(name, settings, "asyncrl_plugins.judges.reward_model", places, on_dropped)

    def _place(self) -> tuple[dict[str, str], dict[str, Any]]:
        environment, device = _own_gpu(self._device, self._name)
        return environment, {"device": device}


def _own_gpu(device: str, name: str) -> tuple[dict[str, str], str]:
    """Environment and device by which a process sees the GPU of that number alone, among all that the launcher has."""
    number, gpus = device.partition(":")[2], listed_gpus(os.environ.get(GPUS_VARIABLE, ""))
    if not number or not gpus:
        return {}, device
    if int(number) >= len(gpus):
        raise UserError(
            f"reward {name}: kwargs.device is {device}, but the run has {len(gpus)} GPU(s), numbered from 0"
        )
    return {"CUDA_VISIBLE_DEVICES": gpus[int(number)]}, "cuda:0"
