"""The worker process: `python -m asyncrl.environments.worker`, started by `pool.py` only.

Loads the environment once and runs many episodes, each in a task of its own, so that async ones wait side by side. A
plain method runs in the event loop: the other episodes of the process wait until it returns.

once        to process  {"memory_limit_mib", "config", "sources", "rule"}
            to pool     {"ready": True, "tools", "call_format", "shows_tools"}
                        or {"ready": False, "message", "traceback"}
per request to process  {"id", "episode", "do": "reset", "step" or "close"}, {"cancel": id, "episode"}
            to pool     {"started": id}; {"id"} with what came of it, "failed": why, or "cancelled"
                        {"busy": episode that holds the event loop at this moment, or None} in answer to a cancel
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from asyncrl.config.environment import read_environment
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Call, Start
from asyncrl.environments.loading import LoadedEnvironment, load
from asyncrl.environments.observation import Message, Observation, PastTurn
from asyncrl.environments.tool_environment import key_of, waited
from asyncrl.errors import UserError
from asyncrl.rewards import channel, process_reaper
from asyncrl.user_functions import one_line, shorten

CLOSE_S = 1.0
"""Seconds for the `close` of an episode whose step was cancelled."""


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    messages = channel.unpacker(incoming)
    setup = next(messages, None)
    if setup is None:
        return
    try:
        loaded = asyncio.run(_load(setup))
    except UserError as error:
        told = shorten(str(error), limit=4000)
        cause = "".join(traceback.format_exception(error.__cause__ or error))
        channel.send(outgoing, {"ready": False, "message": told, "traceback": cause[-4000:]})
        return
    tools = [tool.schema for tool in loaded.tools.values()]
    shows = bool(getattr(loaded.cls, "show_tools", True))
    channel.send(outgoing, {"ready": True, "tools": tools, "call_format": loaded.call_format, "shows_tools": shows})
    asyncio.run(_Worker(loaded, outgoing).run(messages))


async def _load(setup: dict[str, Any]) -> LoadedEnvironment:
    process_reaper.limit_memory(setup["memory_limit_mib"])
    try:
        return await load(read_environment(setup["config"]), setup["sources"], ImageRule(**setup["rule"]))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the environment cannot be loaded: {one_line(error)}") from error


@dataclass
class _Episode:
    requests: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    current: int = 0
    """Id of the request that runs; 0 for none."""


class _Worker:
    def __init__(self, loaded: LoadedEnvironment, outgoing: BinaryIO) -> None:
        self._loaded = loaded
        self._outgoing = outgoing
        self._sending = threading.Lock()
        self._episodes: dict[int, _Episode] = {}
        """Episodes that take requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all episodes, those that have failed and close themselves included."""
        self._pid = os.getpid()

    async def run(self, messages: Iterable[dict[str, Any]]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for message in messages:
                if "cancel" in message:  # said here: the event loop may be held by an author's code
                    busy = asyncio.current_task(loop)
                    self._send({"busy": int(busy.get_name()) if busy and busy.get_name().isdigit() else None})
                loop.call_soon_threadsafe(self._take, message)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    def _take(self, message: dict[str, Any]) -> None:
        number = message["episode"]
        if "cancel" in message:
            episode = self._episodes.get(number)
            if episode is not None and episode.task is not None and episode.current == message["cancel"]:
                episode.task.cancel()
            return
        if message["do"] == "reset":
            episode = self._episodes[number] = _Episode()
            episode.task = asyncio.create_task(self._play(number, episode), name=str(number))
            self._tasks.add(episode.task)
            episode.task.add_done_callback(self._tasks.discard)
        if number in self._episodes:
            self._episodes[number].requests.put_nowait(message)
        else:  # it has failed, and been answered
            self._send({"id": message["id"]})

    async def _play(self, number: int, episode: _Episode) -> None:
        """All of one episode in one task, as libraries with task groups want it. Ends with it, or where it fails."""
        environment: Any = None
        request: dict[str, Any] = {"do": ""}
        while self._episodes.get(number) is episode:
            request = await episode.requests.get()
            episode.current = request["id"]
            self._send({"started": request["id"]})
            reply: dict[str, Any] = {}
            try:
                if request["do"] == "reset":
                    start = Start(**request["start"], config=self._loaded.config)
                    environment, opening = await self._loaded.begin(start)
                    reply = {"opening": _packed(opening), "state_key": key_of(opening) if opening else b""}
                elif request["do"] == "step":
                    reply = await self._step(environment, request["action"])
                else:
                    await self._close(environment)
            except asyncio.CancelledError:
                reply = {"cancelled": True}
            except MemoryError as error:
                limit = f"{process_reaper.memory_limit_mib()} MiB (environment.memory_limit_mib)"
                reply = {"failed": f"over the limit of {limit}: {one_line(error, self._loaded.file)}"}
            except BaseException as error:  # also SystemExit: an author's code must not decide about this process
                reply = {"failed": one_line(error, self._loaded.file)}
            finally:
                if os.getpid() != self._pid:  # the author's code forked, and this is the copy
                    os._exit(0)
            if request["do"] == "close" or "failed" in reply or "cancelled" in reply:
                del self._episodes[number]  # before the answer: a request that follows it is answered at once
            episode.current = 0
            self._send({"id": request["id"]} | reply)
        if request["do"] != "close":
            with suppress(BaseException):
                await asyncio.wait_for(self._close(environment), CLOSE_S)

    async def _step(self, environment: Any, action: dict[str, Any]) -> dict[str, Any]:
        action["calls"] = tuple(Call(**call) for call in action["calls"])
        result = await self._loaded.step(environment, Action(**action))
        reply = {"reward": result.reward, "done": result.done, "state_key": result.state_key, "info": result.info}
        history = [[past.turn, past.text, _packed(past.shown)] for past in result.history]
        return reply | {"observation": _packed(result.observation), "history": history}

    async def _close(self, environment: Any) -> None:
        if hasattr(environment, "close"):
            await waited(environment.close())

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            channel.send(self._outgoing, message)


def _packed(observation: Observation | None) -> list[Any] | None:
    return None if observation is None else [[m.role, list(m.parts)] for m in observation.messages]


def unpacked(messages: list[Any] | None) -> Observation | None:
    """An observation as the worker has sent it."""
    return None if messages is None else Observation(tuple(Message(role, tuple(parts)) for role, parts in messages))


def unpacked_history(history: list[Any]) -> tuple[PastTurn, ...]:
    """An edited history as the worker has sent it."""
    return tuple(PastTurn(turn, text, unpacked(shown)) for turn, text, shown in history)


def packed_start(start: Start) -> dict[str, Any]:
    """A start as the worker takes it: all but the config, which it has."""
    return {name: value for name, value in vars(start).items() if name != "config"}


def packed_action(action: Action) -> dict[str, Any]:
    """An action as the worker takes it."""
    return asdict(action)


if __name__ == "__main__":
    process_reaper.run_guarded(serve)
