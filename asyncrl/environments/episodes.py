"""`EnvironmentWorkers`: episodes in processes that can be killed, whatever an environment does."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, PromptTools, Start
from asyncrl.environments.loading import source_of
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.environments.worker import packed_start, unpacked, unpacked_history
from asyncrl.user_functions import UserFunction, imported_files, one_line
from asyncrl.workers.pool import WorkerPool
from asyncrl.workers.process import Request, WorkerDied, WorkerProcess, WorkerProgram

logger = logging.getLogger(__name__)

Kind = Literal["environment_timeout", "environment_died", "environment_exception", "environment_neighbour_killed"]
"""Kind of failure. After `environment_neighbour_killed`, when another episode ended the process, an episode is tried
again from the start, with the same seed."""
CANCEL_S = 1.0
"""Seconds for an async step that is cancelled to end by itself; then its process is killed."""
MOST_ANSWERS = 10_000
"""Answers whose seconds are kept until they are taken."""


class EnvironmentFailed(Exception):
    """The environment has failed, not the policy: the trajectory is an error of this kind, without a score."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


def said_too_late(do: str, timeout_s: float, setting: str) -> str:
    """Message of an `environment_timeout`."""
    return f"{do} was not done after {timeout_s:g} s (environment.timeouts.{setting})"


class EnvironmentWorkers:
    """Processes that run episodes, for the event loop that called `start()`.

    Example:
        workers = EnvironmentWorkers(config)
        await workers.start()
        episode = await workers.begin(Start(row, seed=7))
        result = await episode.step("crop 1 2")
        await episode.close()
        await workers.close()

    Episodes wait for a place in order of arrival; there are `config.capacity`. The processes end with the thread that
    runs the loop, also where it is killed.
    """

    def __init__(self, config: EnvironmentConfig, rule: ImageRule | None = None) -> None:
        """`rule` has the sizes of the policy's processor; its largest area is the smaller of the two."""
        self.config = config
        most = config.limits.image_pixels
        self._rule = rule or ImageRule()
        if self._rule.max_pixels > most:
            self._rule = ImageRule(self._rule.unit, most, min(self._rule.min_pixels, most))
        self._pool = WorkerPool(config.workers, config.instances_per_worker)
        self.numbers = itertools.count(1)
        """Numbers of the next episodes."""
        self.tools: PromptTools | None = None
        """Tools that prompts tell of. Known after `start()`."""
        self.errors: Counter[str] = Counter()
        """Failures of the environment so far by kind."""
        self.live = 0
        """Episodes that have begun and are not closed."""
        self.suspended = 0
        """Episodes that wait for an answer of their process."""
        self._answers: deque[tuple[str, float]] = deque(maxlen=MOST_ANSWERS)

    async def start(self) -> None:
        """Start the processes, with the environment loaded. Raises UserError where they cannot be."""
        source = source_of(self.config)
        path = source["path"]
        imported = imported_files(UserFunction(Path(path), source["name"], source["package"])) if path else {}
        await self._pool.start(
            WorkerProgram(
                module="asyncrl.environments.worker",
                setup={
                    "name": self.config.name,
                    "config": self.config.config,
                    "source": source,
                    "rule": asdict(self._rule),
                },
                section="environment",
                loads="the environment's files",
                memory_limit_mib=self.config.memory_limit_mib,
                files=imported,
            )
        )
        tools = self._pool.ready["tools"]
        self.tools = PromptTools.from_json(tools) if tools else None

    async def begin(self, start: Start) -> Episode:
        """An episode that has begun. Raises as `Episode.reset`."""
        episode = Episode(self)
        await episode.reset(start)
        return episode

    async def take(self) -> WorkerProcess:
        """A place for an episode, once one is free; `give_back` is due. Raises as `WorkerPool.take`."""
        worker = await self._pool.take()
        self.live += 1
        return worker

    async def close(self) -> None:
        """Kill the processes and everything that they started."""
        await self._pool.close()

    @property
    def restarts(self) -> int:
        """Processes that were started in place of lost ones."""
        return self._pool.restarts

    def take_answers(self) -> list[tuple[str, float]]:
        """`reset` or `step` and its seconds, of the newest answers since the last call."""
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def give_back(self, worker: WorkerProcess) -> None:
        """Free an episode's place."""
        self.live -= 1
        self._pool.give_back(worker)

    async def ask(self, worker: WorkerProcess, message: dict[str, Any]) -> dict[str, Any]:
        """One request of an episode; failures are counted. Raises EnvironmentFailed.

        A cancelled caller's request is cancelled in the process, too.
        """
        self.suspended += 1
        began, do = time.monotonic(), message["do"]
        try:
            answer = await self._answer(worker, message)
            if do != "close":
                self._answers.append((do, time.monotonic() - began))
            return answer
        except EnvironmentFailed as failed:
            self.errors[failed.kind] += 1
            level = logging.WARNING if self.errors[failed.kind] == 1 else logging.DEBUG
            logger.log(level, "%s: %s", failed.kind, failed)
            raise
        finally:
            self.suspended -= 1

    async def _answer(self, worker: WorkerProcess, message: dict[str, Any]) -> dict[str, Any]:
        do, step_s = message["do"], self.config.timeouts.step_s
        try:
            with worker.request(message) as request:
                with suppress(TimeoutError):
                    # Neighbours' plain methods may be before it, each as long as this one may be.
                    queue_s = step_s * self.config.instances_per_worker + CANCEL_S
                    await asyncio.wait_for(request.begun.wait(), queue_s)
                    await asyncio.wait({request.answer}, timeout=step_s)
                if not request.answer.done():
                    await self._give_up(worker, request)
                reply = request.answer.result()
        except asyncio.CancelledError:
            with suppress(WorkerDied), worker.request({"cancel": message["episode"]}):
                pass
            raise
        except TimeoutError:
            raise EnvironmentFailed("environment_timeout", said_too_late(do, step_s, "step_s")) from None
        except WorkerDied as died:
            if died.is_guilty:
                raise EnvironmentFailed(
                    "environment_died", f"the process of the environment was lost: {died}"
                ) from None
            raise EnvironmentFailed("environment_neighbour_killed", f"its process was lost: {died}") from None
        if "failed" in reply:
            raise EnvironmentFailed("environment_exception", f"{do}: {reply['failed']}")
        if reply.get("cancelled"):
            raise EnvironmentFailed("environment_exception", f"{do}: it was cancelled")
        return reply

    async def _give_up(self, worker: WorkerProcess, request: Request) -> None:
        """Cancel what has taken too long; where it does not end by that, kill the process.

        Raises TimeoutError, or WorkerDied where the process was lost meanwhile.
        """
        seen: set[int | None] = set()
        for _ in range(2):  # an episode that holds the event loop is there both times
            with worker.request({"cancel": request.message["episode"]}) as cancel:
                await asyncio.wait({request.answer}, timeout=CANCEL_S / 2)
                if request.answer.done():
                    request.answer.result()
                    raise TimeoutError
                seen.add(cancel.answer.result()["busy"] if cancel.answer.done() else None)
        of_episodes = [each for each in worker.requests if "episode" in each.message]
        stuck = next((each for each in of_episodes if {each.message["episode"]} == seen), request)
        culprit, do = stuck.message["episode"], stuck.message["do"]
        logger.warning("environment worker %s is stuck in episode %s, and is killed", worker.name, culprit)
        worker.kill(f"episode {culprit} was stuck in {do} (environment.timeouts)", late=stuck)
        await worker.stop()


@contextmanager
def _well_formed() -> Iterator[None]:
    """Raise EnvironmentFailed for a reply that no worker of ours sends."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"its process sent a malformed reply ({one_line(error)})"
        raise EnvironmentFailed("environment_died", said) from None


class Episode:
    """One trajectory's side of an environment; `close()` is due in any case."""

    def __init__(self, workers: EnvironmentWorkers) -> None:
        self._workers = workers
        self._worker: WorkerProcess | None = None
        """The process that it has a place in."""
        self._number = 0
        self._turns = 0
        self.opening: Observation | None = None
        """Result of the environment's `reset`: the end of the prompt."""

    async def reset(self, start: Start) -> Observation | None:
        """Begin in a free place, and return the opening; a failed reset is tried again `environment.retries` times.

        Raises EnvironmentFailed, BadStateError where a lost process does not start again, RuntimeError after `close()`.
        """
        for left in range(self._workers.config.retries, -1, -1):
            self._worker, self._number = await self._workers.take(), next(self._workers.numbers)
            try:
                reply = await self._ask({"do": "reset", "start": packed_start(start)})
                with _well_formed():
                    self.opening = unpacked(reply["opening"])
                break
            except BaseException as error:
                await self.close()
                if not left or not isinstance(error, EnvironmentFailed):
                    raise
                logger.warning("reset of an episode failed and is tried again: %s", error)
        return self.opening

    async def step(self, text: str) -> StepResult:
        """The environment's answer to the text of a turn. Raises EnvironmentFailed; then there is only `close()`."""
        action = Action(text, self._turns)
        self._turns += 1
        reply = await self._ask({"do": "step", "action": asdict(action)})
        with _well_formed():
            observation, history = unpacked(reply["observation"]), unpacked_history(reply["history"])
            return StepResult(observation, reply["reward"], reply["done"], reply["state_key"], reply["info"], history)

    async def close(self) -> None:
        """End the episode, wherever it is; what its environment does meanwhile concerns nobody but the log."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if worker.is_alive:
                with suppress(EnvironmentFailed):
                    await self._workers.ask(worker, {"episode": self._number, "do": "close"})
        finally:
            self._workers.give_back(worker)

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._worker is not None, "reset() comes first"
        return await self._workers.ask(self._worker, {"episode": self._number, **message})


def prompt_tools(config: EnvironmentConfig) -> PromptTools | None:
    """Tools of the configured environment, asked of a process that has loaded it; None where it has none.

    For code without an event loop. Raises UserError where the environment cannot be loaded.
    """
    if not config.is_used:
        return None

    async def ask() -> PromptTools | None:
        workers = EnvironmentWorkers(config.model_copy(update={"workers": 1, "instances_per_worker": 1}))
        try:
            await workers.start()
            return workers.tools
        finally:
            await workers.close()

    return asyncio.run(ask())
