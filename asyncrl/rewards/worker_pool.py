"""The worker processes that run reward functions, one request at a time each."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config.sections import RewardConfig, component_name
from asyncrl.errors import BadStateError
from asyncrl.rewards import channel
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score, request_of, scores_of
from asyncrl.rewards.spec import locate, scorer_of
from asyncrl.rewards.worker_process import WorkerDied, WorkerProcess
from asyncrl.user_functions import read_source

logger = logging.getLogger(__name__)


class WorkerPool:
    """`reward.workers` processes. Requests wait for a free one in order of arrival."""

    def __init__(self, config: RewardConfig, on_dropped: Callable[[int], None]) -> None:
        """`on_dropped` is called with numbers of printed bytes that no log has."""
        self.counts: Counter[str] = Counter()
        self._config = config
        self._on_dropped = on_dropped
        self._setup = b""
        self._ids = itertools.count(1)
        self._idle: asyncio.Queue[WorkerProcess | Exception] = asyncio.Queue()
        self._workers: set[WorkerProcess] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        self._setup = _setup_message(self._config)
        starting = [self._add_worker() for _ in range(self._config.workers)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        failures = [result for result in results if result is not None]
        if failures:
            await self.close()
            raise failures[0]

    async def score(
        self, samples: Sequence[RewardSample], scores: Sequence[Score], names: Sequence[str]
    ) -> list[Score]:
        request_id = next(self._ids)
        frame = channel.pack({"id": request_id, **request_of(samples, scores, names)})
        return await self._score_on(await self._idle_worker(), request_id, frame, scores)

    async def close(self) -> None:
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._workers.clear()
        self._idle.put_nowait(closed())

    async def _idle_worker(self) -> WorkerProcess:
        while True:
            worker = await self._idle.get()
            if self._closed or isinstance(worker, Exception):
                failure = worker if isinstance(worker, Exception) and not self._closed else closed()
                self._idle.put_nowait(failure)  # for the next sample that waits
                raise failure
            if worker.alive:
                return worker
            logger.warning("reward worker %s ended while it was idle; starting another", worker.name)
            self._replace(worker)

    async def _score_on(
        self, worker: WorkerProcess, request_id: int, frame: bytes, scores: Sequence[Score]
    ) -> list[Score]:
        started = time.perf_counter()
        healthy = False

        def all_failed(kind: str, message: str) -> list[Score]:
            seconds = time.perf_counter() - started
            message = f"reward component {worker.begun or '(none begun)'!r} {message}"
            return [score.failed(kind, message).later(seconds) for score in scores]

        too_late = f"was not done after {self._config.timeout_s:g} s (reward.timeout_s)"
        try:
            reply = await worker.ask(frame, self._config.timeout_s)
            if reply.get("id") != request_id:
                raise WorkerDied("it answered another sample")
            found = scores_of(reply)
            healthy = all(score.error_kind != "reward_memory" for score in found)  # else it ends
            if reply["seconds"] > self._config.timeout_s:  # it came back just before it would have been killed
                return all_failed("reward_timeout", too_late)
            return found
        except TimeoutError:
            return all_failed("reward_timeout", too_late)
        except WorkerDied as died:
            if self._closed:
                raise closed() from None
            return all_failed("reward_crash", f"lost its worker: {died}")
        finally:  # also when cancelled: the worker is then still busy with this sample
            if healthy:
                self._idle.put_nowait(worker)
            elif not self._closed:
                self._replace(worker)

    async def _add_worker(self) -> None:
        worker = await WorkerProcess.start(self._setup, self._on_dropped)
        self._workers.add(worker)
        self._idle.put_nowait(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        task = asyncio.create_task(self._stop_and_start(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _stop_and_start(self, worker: WorkerProcess) -> None:
        try:
            await worker.stop()
            self._workers.discard(worker)
            await self._add_worker()
        except Exception as error:  # any error must reach the samples that wait for a worker
            self._idle.put_nowait(BadStateError(f"a lost reward worker could not be started again: {error}"))


def closed() -> RuntimeError:
    return RuntimeError("the reward pool is closed")


def _setup_message(config: RewardConfig) -> bytes:
    """The workers' first message. It holds the user's files as they are now: edits change no running run."""
    components: list[dict[str, Any]] = []
    for component in config.functions:
        if scorer_of(component) is not None:
            continue
        name, located = component_name(component), locate(component.function)
        entry = {"name": name, "kwargs": component.kwargs, "function": component.function}
        entry |= {"group": component.group, "shapes": config.shaped[name], "path": "", "package": "", "source": b""}
        if located is not None:
            source = read_source(located.path)
            entry |= {"function": located.name, "path": str(located.path), "package": located.package, "source": source}
        components.append(entry)
    return channel.pack({"memory_limit_mib": config.memory_limit_mib, "components": components})
