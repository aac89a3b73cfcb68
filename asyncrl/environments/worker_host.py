"""One worker process with the episodes in it: requests, deadlines, and who is to blame where it has to be killed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.rewards import channel
from asyncrl.rewards.worker_process import WorkerDied, WorkerProcess

logger = logging.getLogger(__name__)

Kind = Literal["environment_timeout", "environment_died", "environment_exception", "environment_neighbour_killed"]
"""Kind of failure. After `environment_neighbour_killed`, when another episode ended the process, an episode is tried
again from the start, with the same seed."""
CANCEL_S = 1.0
"""Seconds for an async step that is cancelled to end by itself; then its process is killed."""
MAX_REPLY_BYTES = 256 << 20
"""A longer reply did not come from our worker loop: observations carry images."""


class EnvironmentFailed(Exception):
    """The environment has failed, not the policy: the trajectory is an error of this kind, without a score."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


def said_too_late(do: str, timeout_s: float, setting: str) -> str:
    """Message of an `environment_timeout`."""
    return f"{do} was not done after {timeout_s:g} s (environment.timeouts.{setting})"


@dataclass
class _Request:
    episode: int
    do: str
    began: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerHost:
    """A process and what is asked of it. After a kill or a crash it is not `alive`, and every request fails."""

    def __init__(self, process: WorkerProcess, instances: int) -> None:
        self._process = process
        self._instances = instances
        self._ids = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._end = ""
        """How the process ended, for episodes that it had between two turns."""
        self._busy: int | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        return self._process.alive and not self._end

    async def ask(self, request: dict[str, Any], timeout_s: float, setting: str) -> dict[str, Any]:
        """The reply. Raises EnvironmentFailed. A cancelled caller's request is cancelled in the process, too."""
        if not self.alive:
            raise EnvironmentFailed("environment_neighbour_killed", f"its process was lost: {self._end or 'it ended'}")
        number = next(self._ids)
        waiting = self._requests[number] = _Request(request["episode"], request["do"])
        self._process.send(channel.pack({"id": number, **request}))
        try:
            # Neighbours' plain methods may be before it, each as long as this one may be.
            if await self._within(waiting.began, timeout_s * self._instances + CANCEL_S):
                await asyncio.wait({waiting.answer}, timeout=timeout_s)
            if not waiting.answer.done():
                return await self._give_up(number, waiting, timeout_s, setting)
            reply = waiting.answer.result()
        except asyncio.CancelledError:
            self._process.send(channel.pack({"cancel": number, "episode": waiting.episode}))
            raise
        finally:
            self._requests.pop(number, None)
            if waiting.answer.done() and not waiting.answer.cancelled():
                waiting.answer.exception()
        if "failed" in reply:
            raise EnvironmentFailed("environment_exception", f"{waiting.do}: {reply['failed']}")
        if reply.get("cancelled"):
            raise EnvironmentFailed("environment_exception", f"{waiting.do}: it was cancelled")
        return reply

    async def stop(self) -> None:
        if not self._end:
            self._lose("it was stopped", None, "environment_died", "the process of the environment was stopped")
        await self._process.stop()
        await self._reading

    async def _within(self, began: asyncio.Event, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(began.wait(), seconds)
        return began.is_set()

    async def _give_up(self, number: int, waiting: _Request, timeout_s: float, setting: str) -> dict[str, Any]:
        """Cancel what has taken too long; where it does not end by that, kill the process. Raises EnvironmentFailed."""
        too_late = said_too_late(waiting.do, timeout_s, setting)
        seen: set[int | None] = set()
        for _ in range(2):  # an episode that holds the event loop is there both times
            self._busy = None
            self._process.send(channel.pack({"cancel": number, "episode": waiting.episode}))
            await asyncio.wait({waiting.answer}, timeout=CANCEL_S / 2)
            seen.add(self._busy)
        if waiting.answer.done():
            waiting.answer.result()  # may raise: the process was lost meanwhile
            raise EnvironmentFailed("environment_timeout", too_late)
        stuck = next((request for request in self._requests.values() if {request.episode} == seen), waiting)
        culprit = stuck.episode
        logger.warning("environment worker %s is stuck in episode %s, and is killed", self._process.name, culprit)
        self._lose(
            f"episode {culprit} was stuck in {stuck.do} (environment.timeouts)",
            culprit,
            "environment_timeout",
            too_late,
        )
        await self._process.stop()
        return waiting.answer.result()

    def _lose(self, how: str, culprit: int | None, kind: Kind, message: str) -> None:
        """Fail every request: the culprit's (or, of a process that died, all that had begun) with `kind`."""
        self._end = how
        for request in self._requests.values():
            if request.answer.done():
                continue
            guilty = request.episode == culprit if culprit is not None else request.began.is_set()
            if guilty:
                request.answer.set_exception(EnvironmentFailed(kind, message))
            else:
                told = f"its process was lost: {how}"
                request.answer.set_exception(EnvironmentFailed("environment_neighbour_killed", told))
            request.began.set()

    async def _read(self) -> None:
        """Hand replies to those that wait for them, until the process ends."""
        try:
            while True:
                reply = await self._process.receive()
                if "busy" in reply:
                    self._busy = reply["busy"]
                elif "started" in reply:
                    if reply["started"] in self._requests:
                        self._requests[reply["started"]].began.set()
                elif reply.get("id") in self._requests and not self._requests[reply["id"]].answer.done():
                    self._requests[reply["id"]].began.set()
                    self._requests[reply["id"]].answer.set_result(reply)
        except WorkerDied as died:
            if not self._end:
                self._lose(f"{died}", None, "environment_died", f"the process of the environment was lost: {died}")
