"""`EnvironmentPool`: episodes in processes that can be killed, whatever an environment does."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.call_formats import parse_calls
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Start
from asyncrl.environments.loading import sources_of
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.environments.worker import packed_action, packed_start, unpacked, unpacked_history
from asyncrl.environments.worker_host import MAX_REPLY_BYTES, EnvironmentFailed, WorkerHost
from asyncrl.errors import BadStateError, UserError
from asyncrl.rewards import channel
from asyncrl.rewards.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0
"""Longest time for a worker to import the environment's files."""
START_TRIES = 3
"""Starts of a lost process that may fail one after the other; then the run stops."""
BACK_OFF_S = 0.5
"""Seconds before the second of them; twice as long before the third."""


class EnvironmentPool:
    """Processes that run episodes, for the event loop that called `start()`.

    Example:
        pool = EnvironmentPool(config)
        await pool.start()
        episode = await pool.begin(Start(row, seed=7))
        result = await episode.step(pool.action("crop 1 2"))
        await episode.close()
        await pool.close()

    Episodes wait for a place in order of arrival; there are `config.capacity`. The processes end with the thread that
    runs the loop, also where it is killed.
    """

    def __init__(self, config: EnvironmentConfig, rule: ImageRule | None = None) -> None:
        """`rule` has the sizes of the policy's processor; its largest area is the smaller of the two."""
        self._config = config
        most = config.limits.image_pixels
        self._rule = rule or ImageRule()
        if self._rule.max_pixels > most:
            self._rule = ImageRule(self._rule.unit, most, min(self._rule.min_pixels, most))
        self._setup = b""
        self._numbers = itertools.count(1)
        self._places: asyncio.Queue[WorkerHost | Exception] = asyncio.Queue()
        self._hosts: set[WorkerHost] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False
        self.tools: list[dict[str, Any]] = []
        """Schemas of the tools as chat templates take them. Known after `start()`."""
        self.call_format = ""
        """The format in which the policy calls them."""
        self.shows_tools = True
        """Whether the prompt is to tell of them; False: the environment does so itself."""
        self.errors: Counter[str] = Counter()
        """Failures of the environment so far by kind."""
        self.restarts = 0
        """Processes that were started in place of lost ones."""
        self.live = 0
        """Episodes that have begun and are not closed."""
        self.parked = 0
        """Episodes that wait for an answer of their process."""
        self._answers: list[tuple[str, float]] = []

    async def start(self) -> None:
        """Start the processes, with the environment loaded. Raises UserError where they cannot be."""
        self._setup = channel.pack(
            {
                "memory_limit_mib": self._config.memory_limit_mib,
                "config": self._config.model_dump(),
                "sources": sources_of(self._config),
                "rule": asdict(self._rule),
            }
        )
        starting = [self._start_host() for _ in range(self._config.workers)]
        hosts = await asyncio.gather(*starting, return_exceptions=True)
        failures = [host for host in hosts if isinstance(host, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        for _ in range(self._config.instances_per_worker):  # the first episodes are spread over all processes
            for host in self._hosts:
                self._places.put_nowait(host)

    def action(self, text: str, turn: int = 0, finish_reason: str = "stop") -> Action:
        """A turn of the policy with the calls that its text holds."""
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        return Action(text, parse_calls(self.call_format, text, schemas, finish_reason), turn, finish_reason)

    async def begin(self, start: Start) -> Episode:
        """Begin an episode in a free place; a failed reset is tried again `environment.retries` times.

        Raises EnvironmentFailed, BadStateError where a lost process does not start again, RuntimeError after `close()`.
        """
        for again in range(self._config.retries, -1, -1):
            episode = Episode(self, await self._place(), next(self._numbers), start)
            try:
                await episode.reset()
                return episode
            except EnvironmentFailed as failed:
                await episode.close()
                if not again:
                    raise
                logger.warning("reset of an episode failed and is tried again: %s", failed)
            except BaseException:
                await episode.close()
                raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Kill the processes and everything that they started."""
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(host.stop() for host in self._hosts))
        self._hosts.clear()
        self._places.put_nowait(RuntimeError("the environment pool is closed"))

    async def ask(self, host: WorkerHost, request: dict[str, Any]) -> dict[str, Any]:
        """One request of an episode; failures are counted, and a lost process is replaced. Raises EnvironmentFailed."""
        self.parked += 1
        began = time.monotonic()
        try:
            answer = await host.ask(request, self._config.timeouts.step_s, "step_s")
            if request["do"] != "close":
                self._answers.append((request["do"], time.monotonic() - began))
            return answer
        except EnvironmentFailed as failed:
            self.errors[failed.kind] += 1
            level = logging.WARNING if self.errors[failed.kind] == 1 else logging.DEBUG
            logger.log(level, "%s: %s", failed.kind, failed)
            raise
        finally:
            self.parked -= 1
            self._replace_if_lost(host)

    def take_answers(self) -> list[tuple[str, float]]:
        """`reset` or `step` and its seconds, of each answer since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def give_back(self, host: WorkerHost) -> None:
        """Free an episode's place."""
        self.live -= 1
        if host.alive:
            self._places.put_nowait(host)
        self._replace_if_lost(host)

    async def _place(self) -> WorkerHost:
        while True:
            host = await self._places.get()
            if isinstance(host, Exception):
                self._places.put_nowait(host)  # for the next one that waits
                raise host
            if host.alive:
                self.live += 1
                return host
            self._replace_if_lost(host)  # its place is gone, and comes back with its successor

    async def _start_host(self) -> WorkerHost:
        process = await WorkerProcess.start(
            self._setup,
            lambda nbytes: None,
            "asyncrl.environments.worker",
            timeout_s=IMPORT_TIMEOUT_S,
            section="environment",
            loads="the environment's files",
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self.tools, self.call_format = process.ready["tools"], process.ready["call_format"]
        self.shows_tools = process.ready["shows_tools"]
        host = WorkerHost(process, self._config.instances_per_worker)
        self._hosts.add(host)
        return host

    def _replace_if_lost(self, host: WorkerHost) -> None:
        if host.alive or host not in self._hosts or self._closed:
            return
        self._hosts.discard(host)
        task = asyncio.create_task(self._stop_and_start(host))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _stop_and_start(self, lost: WorkerHost) -> None:
        try:
            await lost.stop()
            host = await self._restarted()
        except Exception as error:  # any error must reach the episodes that wait for a place
            self._places.put_nowait(error if isinstance(error, BadStateError) else BadStateError(str(error)))
            return
        self.restarts += 1
        for _ in range(self._config.instances_per_worker):
            self._places.put_nowait(host)

    async def _restarted(self) -> WorkerHost:
        """Raises BadStateError with the traceback of the last failure."""
        tools = self.tools
        failure: UserError | None = None
        for failures in range(START_TRIES):
            if failures:
                await asyncio.sleep(BACK_OFF_S * 2 ** (failures - 1))
            try:
                host = await self._start_host()
            except UserError as error:
                failure = error
                continue
            if self.tools != tools:
                raise BadStateError("the environment's tools have changed since the run began. Start a new run")
            return host
        told = f"{failure}\n{failure.__cause__}" if failure and failure.__cause__ else str(failure)
        raise BadStateError(
            f"a lost process of the environment could not be started again, {START_TRIES} times one after the other: "
            f"{told}"
        )


class Episode:
    """One trajectory's side of an environment. Made by `EnvironmentPool.begin`; `close()` is due in any case."""

    def __init__(self, pool: EnvironmentPool, host: WorkerHost, number: int, start: Start) -> None:
        self._pool = pool
        self._host = host
        self._number = number
        self._start = start
        self._closed = False
        self.opening: Observation | None = None
        """Result of `reset`: the end of the prompt."""
        self.state_key = b""
        """Key of the state in which the first turn is taken."""

    async def reset(self) -> None:
        reply = await self._ask("reset", {"start": packed_start(self._start)})
        self.opening, self.state_key = unpacked(reply["opening"]), reply["state_key"]

    async def step(self, action: Action) -> StepResult:
        """The environment's answer to one turn. Raises EnvironmentFailed, after which there is only `close()`."""
        reply = await self._ask("step", {"action": packed_action(action)})
        observation, history = unpacked(reply["observation"]), unpacked_history(reply["history"])
        return StepResult(observation, reply["reward"], reply["done"], reply["state_key"], reply["info"], history)

    async def close(self) -> None:
        """End the episode, wherever it is; what its environment does meanwhile concerns nobody but the log."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._host.alive:
                with suppress(EnvironmentFailed):
                    await self._ask("close", {})
        finally:
            self._pool.give_back(self._host)

    async def _ask(self, do: str, request: dict[str, Any]) -> dict[str, Any]:
        request = {"episode": self._number, "do": do, **request}
        return await self._pool.ask(self._host, request)
