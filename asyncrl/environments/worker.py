"""The worker process: `python -m asyncrl.environments.worker`, started by `episodes.py` only.

Loads the environment once and runs many episodes, each in a task of its own, so that async ones wait side by side. A
plain method runs in the event loop: the other episodes of the process wait until it returns.

setup    {"name", "config", "source", "rule"}; the parent is told {"tools": PromptTools as JSON, or empty}
request  {"episode", "do": "reset", "step" or "close"}, {"cancel": episode}
reply    result of the method, {"failed": reason} or {"cancelled": True}; after a cancel
         {"busy": episode that holds the event loop at this moment, or None}
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Start
from asyncrl.environments.loading import LoadedEnvironment, load, waited
from asyncrl.environments.observation import Message, Observation, PastTurn
from asyncrl.user_functions import one_line
from asyncrl.workers.channel import Channel, Serve, over_limit, run_worker

CLOSE_S = 1.0
"""Seconds for the `close` of an episode whose step was cancelled."""


def _load(setup: dict[str, Any]) -> tuple[dict[str, Any], Serve]:
    loaded = asyncio.run(load(setup["name"], setup["config"], setup["source"], ImageRule(**setup["rule"])))
    told = {"tools": loaded.tools.as_json if loaded.tools else ""}
    return told, lambda channel: asyncio.run(_Worker(loaded, channel).run())


@dataclass
class _Episode:
    requests: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    is_asked: bool = False
    """Whether a request runs."""


class _Worker:
    def __init__(self, loaded: LoadedEnvironment, channel: Channel) -> None:
        self._loaded = loaded
        self._channel = channel
        self._episodes: dict[int, _Episode] = {}
        """Episodes that take requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all episodes, those that have failed and close themselves included."""

    async def run(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for message in self._channel:
                if "cancel" in message:  # said here: the event loop may be held by an author's code
                    busy = asyncio.current_task(loop)
                    number = int(busy.get_name()) if busy and busy.get_name().isdigit() else None
                    self._channel.send({"id": message["id"], "busy": number})
                loop.call_soon_threadsafe(self._take, message)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    def _take(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            episode = self._episodes.get(message["cancel"])
            if episode is not None and episode.task is not None and episode.is_asked:
                episode.task.cancel()
            return
        number = message["episode"]
        if message["do"] == "reset":
            episode = self._episodes[number] = _Episode()
            episode.task = asyncio.create_task(self._play(number, episode), name=str(number))
            self._tasks.add(episode.task)
            episode.task.add_done_callback(self._tasks.discard)
        if number in self._episodes:
            self._episodes[number].requests.put_nowait(message)
        else:  # it has failed, and been answered
            self._channel.send({"id": message["id"]})

    async def _play(self, number: int, episode: _Episode) -> None:
        """All of one episode in one task, as libraries with task groups want it. Ends with it, or where it fails."""
        environment: Any = None
        request: dict[str, Any] = {"do": ""}
        while self._episodes.get(number) is episode:
            request = await episode.requests.get()
            episode.is_asked = True
            self._channel.send({"begun": request["id"], "part": request["do"]})
            reply: dict[str, Any] = {}
            try:
                if request["do"] == "reset":
                    start = Start(**request["start"], config=self._loaded.config)
                    environment, opening = await self._loaded.begin(start)
                    reply = {"opening": _packed(opening)}
                elif request["do"] == "step":
                    reply = await self._step(environment, request["action"])
                else:
                    await self._close(environment)
            except asyncio.CancelledError:
                reply = {"cancelled": True}
            except MemoryError as error:
                reply = {"failed": over_limit("environment", error, self._loaded.file)}
            except BaseException as error:  # also SystemExit: an author's code must not decide about this process
                reply = {"failed": one_line(error, self._loaded.file)}
            if request["do"] == "close" or "failed" in reply or "cancelled" in reply:
                del self._episodes[number]  # before the answer: a request that follows it is answered at once
            episode.is_asked = False
            self._channel.send({"id": request["id"]} | reply)
        if request["do"] != "close":
            with suppress(BaseException):
                await asyncio.wait_for(self._close(environment), CLOSE_S)

    async def _step(self, environment: Any, action: dict[str, Any]) -> dict[str, Any]:
        result = await self._loaded.step(environment, Action(**action))
        reply = {"reward": result.reward, "done": result.done, "state_key": result.state_key, "info": result.info}
        history = [[past.turn, past.text, _packed(past.shown)] for past in result.history]
        return reply | {"observation": _packed(result.observation), "history": history}

    async def _close(self, environment: Any) -> None:
        if hasattr(environment, "close"):
            await waited(environment.close())


def _packed(observation: Observation | None) -> list[Any] | None:
    return None if observation is None else [[m.role, list(m.parts), list(m.own)] for m in observation.messages]


def unpacked(messages: list[Any] | None) -> Observation | None:
    """An observation as the worker has sent it."""
    if messages is None:
        return None
    return Observation(tuple(Message(role, tuple(parts), tuple(own)) for role, parts, own in messages))


def unpacked_history(history: list[Any]) -> tuple[PastTurn, ...]:
    """An edited history as the worker has sent it."""
    return tuple(PastTurn(turn, text, unpacked(shown)) for turn, text, shown in history)


def packed_start(start: Start) -> dict[str, Any]:
    """A start as the worker takes it: all but the config, which it has."""
    return {name: value for name, value in vars(start).items() if name != "config"}


if __name__ == "__main__":
    run_worker(_load)
