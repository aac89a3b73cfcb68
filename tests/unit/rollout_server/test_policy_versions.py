"""The version that a server's engine holds: what it does where one is late, gone, or that of another learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from asyncrl.config.schema import RunConfig
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import WeightManifest, WeightsLoaded, Welcome
from rollout_server.weights.policy_versions import PolicyVersions

MakeConfig = Callable[..., RunConfig]

WAIT_S = 30.0
A_WHILE_S = 0.3
"""In which happens what must not."""
GONE = ProtocolError(ErrorCode.VERSION_GONE, "nothing is published yet")


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, publication="p", tensors=(), total_bytes=0)


def welcome(version: int, incarnation: str = "second") -> Welcome:
    return Welcome(
        run_id="run",
        incarnation=incarnation,
        host_id="host",
        version=version,
        weights_port=1,
        heartbeat_s=1.0,
        timeout_s=1.0,
    )


class Receiver:
    """Every attempt ends as the test says."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self._ends: asyncio.Queue[Exception | None] = asyncio.Queue()

    def end(self, problem: Exception | None = None) -> None:
        self._ends.put_nowait(problem)

    async def is_asked(self) -> None:
        while not self.attempts:
            await asyncio.sleep(0)

    async def load(self, offered: WeightManifest) -> WeightsLoaded:
        self.attempts.append(offered.version)
        if problem := await self._ends.get():
            raise problem
        return WeightsLoaded(version=offered.version, channel="zmq", transfer_s=0.0, load_s=0.0)


@asynccontextmanager
async def following(config: RunConfig, receiver: Any, told: Any = None):
    """`told` is given what the learner and the metrics are."""
    listener: Any = told or AsyncMock(loaded=Mock())
    held = PolicyVersions(config.learner.wait_timeout_s, receiver, listener, listener.loaded, "first", nullcontext)
    task = asyncio.create_task(held.follow())
    try:
        async with asyncio.timeout(WAIT_S):
            yield held
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def has_version(held: PolicyVersions, version: int) -> None:
    async with held.at_least(version):
        pass


def test_a_version_that_did_not_arrive_in_time_is_asked_for_again(make_config: MakeConfig) -> None:
    """On policy no other one is announced before there are groups of this one."""

    async def run() -> None:
        receiver, listener = Receiver(), AsyncMock(loaded=Mock())
        async with following(make_config(), receiver, listener) as held:
            held.announce(manifest(3))
            for problem in (TimeoutError("no weights arrived"), TimeoutError("no weights arrived"), None):
                receiver.end(problem)
            await has_version(held, 3)
        assert receiver.attempts == [3, 3, 3]
        assert [sent.args[0].version for sent in listener.send.mock_calls] == [3]

    asyncio.run(run())


@pytest.mark.parametrize("announced", ["before", "after"])
def test_where_a_version_is_gone_the_next_one_is_taken(make_config: MakeConfig, announced: str) -> None:
    """Announced before the answer or after it; the one that is gone is not asked for again."""

    async def run() -> None:
        receiver = Receiver()
        async with following(make_config(), receiver) as held:
            held.announce(manifest(3))
            await receiver.is_asked()
            if announced == "before":
                held.announce(manifest(4))
                receiver.end(GONE)
            else:
                receiver.end(GONE)
                await asyncio.sleep(A_WHILE_S)
                held.announce(manifest(4))
            receiver.end()
            await has_version(held, 4)
        assert receiver.attempts == [3, 4]

    asyncio.run(run())


@pytest.mark.parametrize("problem", [None, TimeoutError("no weights arrived")])
def test_what_a_learner_that_has_been_replaced_announced_is_neither_counted_nor_asked_for_again(
    make_config: MakeConfig, problem: Exception | None
) -> None:
    """The next incarnation's version of the same number may have other bits."""

    async def run() -> None:
        receiver, listener = Receiver(), AsyncMock(loaded=Mock())
        async with following(make_config(), receiver, listener) as held:
            held.announce(manifest(3))
            await receiver.is_asked()
            assert held.learner_came_back(welcome(3))
            assert not held.learner_came_back(welcome(3)), "the same one, after a pause of the network"
            receiver.end(problem)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(has_version(held, 3), A_WHILE_S)
            assert receiver.attempts == [3]
            held.announce(manifest(3))
            receiver.end()
            await has_version(held, 3)
        assert receiver.attempts == [3, 3]
        assert [sent.args[0].version for sent in listener.send.mock_calls] == [3]

    asyncio.run(run())


def test_an_older_version_is_loaded_when_what_is_sampled_is_finished(make_config: MakeConfig) -> None:
    """For an evaluation whose servers are gone. A completion whose versions fall would be refused."""

    async def run() -> None:
        receiver = Receiver()
        async with following(make_config(), receiver) as held:
            for version in (3, 3, 2):
                if version == 2:
                    async with held.at_least(3):
                        held.announce(manifest(2))
                        await asyncio.sleep(A_WHILE_S)
                        assert receiver.attempts == [3], "announced twice it is loaded once"
                        with pytest.raises(TimeoutError):
                            await asyncio.wait_for(has_version(held, 0), A_WHILE_S)
                else:
                    held.announce(manifest(version))
                receiver.end()
                await has_version(held, min(version, 2))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(has_version(held, 3), A_WHILE_S)
            held.announce(manifest(3))
            receiver.end()
            await has_version(held, 3)
        assert receiver.attempts == [3, 2, 3]

    asyncio.run(run())


@pytest.mark.parametrize(("at", "held_until_then"), [(2, 1), (3, 2), (5, 3)])
def test_a_learner_that_came_back_earlier_or_later_in_the_run(
    make_config: MakeConfig, at: int, held_until_then: int
) -> None:
    """What is held counts as older than the first version that the new one announces, and as no older than it is."""

    async def run() -> None:
        receiver = Receiver()
        async with following(make_config(), receiver) as held:
            held.announce(manifest(3))
            receiver.end()
            await has_version(held, 3)
            held.learner_came_back(welcome(at))
            await asyncio.wait_for(has_version(held, held_until_then), WAIT_S)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(has_version(held, held_until_then + 1), A_WHILE_S)
            held.announce(manifest(at))
            receiver.end()
            await has_version(held, at)
        assert receiver.attempts == [3, at]

    asyncio.run(run())
