"""`RewardPool`: many samples in, scores out, whatever the reward functions do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.sections import RewardConfig, component_name
from asyncrl.errors import BadStateError
from asyncrl.plugins import read_source
from asyncrl.rewards import channel
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import check_rewards, locate
from asyncrl.rewards.worker_process import SHOWN_BYTES, WorkerDied, WorkerProcess

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """The outcome of one sample. `components` and `reward` are filled only where the status is `ok`."""

    status: Literal["ok", "timed_out", "error"]
    error_kind: str = ""
    """reward_exception, reward_timeout, reward_memory, reward_nan, reward_type or reward_crash."""
    error_message: str = ""
    """Names the component and, where there is one, the file and line."""
    components: dict[str, float] = field(default_factory=dict)
    """Each component before weighting."""
    reward: float | None = None
    """The weighted sum."""
    seconds: float = 0.0
    """Time on this sample in the worker, waiting for a free worker not included."""


class RewardPool:
    """`reward.workers` processes that score samples, for the event loop that called `start()`.

    Example:
        pool = RewardPool(config.reward)
        await pool.start()
        score = await pool.score(RewardSample(completion="4", answer="4"))
        await pool.close()

    Samples wait in order of arrival; the caller bounds how many there are. The workers end with the
    thread that runs the loop, also where it is killed.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._names = config.component_names
        self._setup = b""
        self._ids = itertools.count(1)
        self._idle: asyncio.Queue[WorkerProcess | Exception] = asyncio.Queue()
        self._workers: set[WorkerProcess] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self.errors: Counter[str] = Counter()
        """Failed samples so far by error kind."""
        self.output_dropped_bytes = 0
        """Bytes that rewards printed beyond SHOWN_BYTES per sample, which no log has."""
        self._closed = False

    async def start(self) -> None:
        """Start the workers, each with all functions loaded. Raises UserError where they cannot be."""
        self._setup = _setup_message(self._config)
        starting = [self._add_worker() for _ in range(self._config.workers)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        failures = [result for result in results if result is not None]
        if failures:
            await self.close()
            raise failures[0]

    async def score(self, sample: RewardSample) -> Score:
        """Score one sample; failures of the reward are in the returned Score.

        Raises BadStateError if a worker that was lost could not be started again, RuntimeError after `close()`.
        """
        sample_id = next(self._ids)
        frame = channel.pack({"id": sample_id, "sample": vars(sample)})
        score = await self._score_on(await self._idle_worker(), sample_id, frame)
        if score.status != "ok":
            self.errors[score.error_kind] += 1
            level = logging.WARNING if self.errors[score.error_kind] == 1 else logging.DEBUG
            logger.log(level, "row %s, %s: %s", sample.row_id, score.error_kind, score.error_message)
        return score

    async def close(self) -> None:
        """Kill the workers and everything that they started; a pending `score()` raises RuntimeError."""
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._workers.clear()
        self._idle.put_nowait(_closed())

    async def _idle_worker(self) -> WorkerProcess:
        while True:
            worker = await self._idle.get()
            if self._closed or isinstance(worker, Exception):
                failure = worker if isinstance(worker, Exception) and not self._closed else _closed()
                self._idle.put_nowait(failure)  # for the next sample that waits
                raise failure
            if worker.alive:
                return worker
            logger.warning("reward worker %d ended while it was idle; starting another", worker.pid)
            self._replace(worker)

    async def _score_on(self, worker: WorkerProcess, sample_id: int, frame: bytes) -> Score:
        started = time.perf_counter()
        healthy = False
        try:
            reply = await worker.ask(frame, self._config.timeout_s)
            if reply.get("id") != sample_id:
                raise WorkerDied("it answered another sample")
            score = self._from_reply(reply)
            healthy = score.error_kind != "reward_memory"  # such a worker ends itself
            return score
        except TimeoutError:
            return self._timed_out(self._begun(worker), time.perf_counter() - started)
        except WorkerDied as died:
            if self._closed:
                raise _closed() from None
            message = f"reward component {self._begun(worker)!r} lost its worker: {died}"
            return Score("error", "reward_crash", message, seconds=time.perf_counter() - started)
        finally:  # also when cancelled: the worker is then still busy with this sample
            if healthy:
                self._idle.put_nowait(worker)
            elif not self._closed:
                self._replace(worker)

    def _begun(self, worker: WorkerProcess) -> str:
        """Name of the component that the worker began last for its sample."""
        return "(none begun)" if worker.begun is None else self._names[worker.begun]

    def _from_reply(self, reply: dict[str, Any]) -> Score:
        seconds, values, kind = reply["seconds"], reply["components"], reply.get("error_kind", "")
        failed_at = self._names[len(values)] if kind else ""
        if seconds > self._config.timeout_s:  # it came back just before it would have been killed
            return self._timed_out(failed_at or self._names[-1], seconds)
        if kind:
            message = f"reward component {failed_at!r}: {reply.get('error_message')}"
            return Score("error", kind, message, seconds=seconds)
        reward = sum(part.weight * values[component_name(part)] for part in self._config.functions)
        if not math.isfinite(reward):
            return Score("error", "reward_nan", f"the weighted sum of {values} is {reward}", seconds=seconds)
        return Score("ok", components=values, reward=reward, seconds=seconds)

    def _timed_out(self, name: str, seconds: float) -> Score:
        limit = f"{self._config.timeout_s:g} s (reward.timeout_s)"
        message = f"reward component {name!r} was not done after {limit}"
        return Score("timed_out", "reward_timeout", message, seconds=seconds)

    async def _add_worker(self) -> None:
        worker = await WorkerProcess.start(self._setup, self._count_dropped)
        self._workers.add(worker)
        self._idle.put_nowait(worker)

    def _count_dropped(self, nbytes: int) -> None:
        if not self.output_dropped_bytes:
            logger.warning(
                "a reward printed more than %d bytes for one sample: what is beyond is dropped, and counted in "
                "asyncrl_rollout_reward_output_dropped_bytes_total. Let it write to a file of its own to keep all",
                SHOWN_BYTES,
            )
        self.output_dropped_bytes += nbytes

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


async def try_loading(config: RewardConfig) -> None:
    """Load all functions in a worker, and end it. Raises UserError where they cannot be loaded."""
    pool = RewardPool(config.model_copy(update={"workers": 1}))
    await pool.start()
    await pool.close()


def _setup_message(config: RewardConfig) -> bytes:
    """The workers' first message. It holds the user's files as they are now: edits change no running run."""
    check_rewards(config)
    components = []
    for component in config.functions:
        located = locate(component.function)
        entry = {"name": component_name(component), "kwargs": component.kwargs, "function": component.function}
        entry |= {"path": "", "package": "", "source": b""}
        if located is not None:
            source = read_source(located.path)
            entry |= {"function": located.name, "path": str(located.path), "package": located.package, "source": source}
        components.append(entry)
    return channel.pack({"memory_limit_mib": config.memory_limit_mib, "components": components})


def _closed() -> RuntimeError:
    return RuntimeError("the reward pool is closed")
