"""The version that a server's engine holds: what it does where one is late, gone, or that of another learner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.published import fingerprint_of
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Chunk, ChunkRequest, Error, WeightManifest, WeightsFromServer, WeightsLoaded, Welcome
from protocol.sockets import CHUNK_QUEUES, LearnerSocket, Received
from protocol.transfer import CHUNK_BYTES, WINDOW, answer_chunk_request
from protocol.weights import Publication, Tensor
from rollout_server.weights.receiver import WeightReceiver
from rollout_server.weights.version_tracker import PolicyVersionTracker

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


class Listener:
    """The learner, as far as it is told of versions."""

    def __init__(self) -> None:
        self.told: list[int] = []

    async def send(self, message: WeightsLoaded) -> None:
        self.told.append(message.version)

    def loaded(self, message: WeightsLoaded, nbytes: int) -> None:
        pass


@asynccontextmanager
async def following(config: RunConfig, receiver: Any, listener: Any):
    held = PolicyVersionTracker(config, receiver, listener, listener, "first", nullcontext)
    task = asyncio.create_task(held.follow())
    try:
        async with asyncio.timeout(WAIT_S):
            yield held
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def has_version(held: PolicyVersionTracker, version: int) -> None:
    async with held.at_least(version):
        pass


def test_a_version_that_did_not_arrive_in_time_is_asked_for_again(make_config: MakeConfig) -> None:
    """On policy no other one is announced before there are groups of this one."""

    async def run() -> None:
        receiver, listener = Receiver(), Listener()
        async with following(make_config(), receiver, listener) as held:
            held.announce(manifest(3))
            for problem in (TimeoutError("no weights arrived"), TimeoutError("no weights arrived"), None):
                receiver.end(problem)
            await has_version(held, 3)
        assert receiver.attempts == [3, 3, 3]
        assert listener.told == [3]

    asyncio.run(run())


@pytest.mark.parametrize("announced", ["before", "after"])
def test_where_a_version_is_gone_the_next_one_is_taken(make_config: MakeConfig, announced: str) -> None:
    """Announced before the answer or after it; the one that is gone is not asked for again."""

    async def run() -> None:
        receiver = Receiver()
        async with following(make_config(), receiver, Listener()) as held:
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


def test_what_was_loaded_from_a_learner_that_has_been_replaced_does_not_count(make_config: MakeConfig) -> None:
    """The next incarnation's version of the same number may have other bits."""

    async def run() -> None:
        receiver, listener = Receiver(), Listener()
        async with following(make_config(), receiver, listener) as held:
            held.announce(manifest(3))
            await receiver.is_asked()
            assert held.learner_came_back(welcome(3))
            assert not held.learner_came_back(welcome(3)), "the same one, after a pause of the network"
            receiver.end()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(has_version(held, 3), A_WHILE_S)
            assert receiver.attempts == [3]
            held.announce(manifest(3))
            receiver.end()
            await has_version(held, 3)
        assert receiver.attempts == [3, 3]
        assert listener.told == [3]

    asyncio.run(run())


def test_what_one_learner_announced_is_not_asked_of_the_next(make_config: MakeConfig) -> None:
    """Which would say of it that it is gone, and might say so after it has announced its own of that number."""

    async def run() -> None:
        receiver = Receiver()
        async with following(make_config(), receiver, Listener()) as held:
            held.announce(manifest(3))
            await receiver.is_asked()
            held.learner_came_back(welcome(3))
            receiver.end(TimeoutError("no weights arrived"))
            await asyncio.sleep(A_WHILE_S)
        assert receiver.attempts == [3]

    asyncio.run(run())


@pytest.mark.parametrize(("at", "held_until_then"), [(2, 1), (3, 2), (5, 3)])
def test_a_learner_that_came_back_earlier_or_later_in_the_run(
    make_config: MakeConfig, at: int, held_until_then: int
) -> None:
    """What is held counts as older than the first version that the new one announces, and as no older than it is."""

    async def run() -> None:
        receiver = Receiver()
        async with following(make_config(), receiver, Listener()) as held:
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


# --- a learner that dies while a version is pulled from it, and comes back at the same port ----------------------

NUM_CHUNKS = 2 * WINDOW
NUM_BYTES = NUM_CHUNKS * CHUNK_BYTES


class Learner:
    """The weights endpoint, over which first nothing is to be had, as between the start of a process and its first
    version."""

    def __init__(self, folder: Path):
        self.before = Publication("run", folder)
        self.publication = Publication("run", folder)
        self.answered: list[type] = []
        self.socket = LearnerSocket(
            "tcp://127.0.0.1:0", WeightsFromServer, setting="network.weights_port", linger_s=0, queues=CHUNK_QUEUES
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            self.socket.socket.poll(20)
            for received in self.socket.turn():
                if isinstance(received, Received) and isinstance(received.message, ChunkRequest):
                    answer = answer_chunk_request(self.publication, received.message)
                    self.answered.append(type(answer))
                    self.socket.send(received.identity, answer)
        self.socket.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.before.close()
        self.publication.close()


class Engine:
    """Has a model of one large tensor, all of whose bytes are the same."""

    architecture_fingerprint = fingerprint_of((("w", "torch.uint8", (NUM_BYTES,)),))

    def __init__(self) -> None:
        self.fills: list[int] = []

    async def update_weights(self, version: int, weights: Any) -> None:
        for _, tensor in weights:
            assert bool(torch.all(tensor == tensor[0]))
            self.fills.append(int(tensor[0]))


def filled(fill: int) -> list[Tensor]:
    return [Tensor("w", "uint8", (NUM_BYTES,), memoryview(bytes([fill]) * NUM_BYTES))]


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    opened = Learner(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("published", ["before our welcome", "after our welcome"])
def test_a_learner_that_comes_back_during_a_pull_is_followed_at_once_and_its_bits_are_the_ones(
    make_config: MakeConfig, learner: Learner, published: str
) -> None:
    """A window of requests has been refused by then, of whose answers only the first has been read. Another server may
    be welcomed earlier, and then there are chunks of the same number and of other bits to be had before our welcome.
    """

    async def run() -> None:
        engine: Any = Engine()
        listener = Listener()
        receiver = WeightReceiver(make_config(), engine, "zmq", learner.socket.endpoint)
        async with following(make_config(), receiver, listener) as held:
            if published == "before our welcome":
                new = learner.publication.publish(3, filled(2))
            held.announce(learner.before.publish(3, filled(1)))
            while len(learner.answered) < WINDOW:
                await asyncio.sleep(0.01)
            await asyncio.sleep(A_WHILE_S)
            refused = len(learner.answered)
            await asyncio.sleep(A_WHILE_S)
            assert learner.answered == refused * [Error], "and nothing is asked for again"
            if published == "after our welcome":
                new = learner.publication.publish(3, filled(2))
            held.learner_came_back(welcome(3))
            receiver.take_from_now_on("zmq", None, learner.socket.endpoint)
            held.announce(new)
            await has_version(held, 3)
        receiver.close()
        assert engine.fills == [2]
        assert listener.told == [3]
        assert set(learner.answered[refused:]) == {Chunk}

    asyncio.run(run())
