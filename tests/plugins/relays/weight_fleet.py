"""A learner's weights endpoint in a thread, and servers that fetch versions from it and from each other, without
engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.relays.puller import RelayPuller
from protocol.download import CHUNK_BYTES, answer_chunk_request
from protocol.messages import (
    Chunk,
    ChunkRequest,
    Error,
    Source,
    SourceRequest,
    WeightManifest,
    WeightsFromLearner,
    WeightsFromServer,
)
from protocol.sockets import LearnerSocket, Received, ServerSocket
from protocol.weights import Publication, Tensor

LONGEST_S = 20.0


def version(seed: int, tensors: int = 6) -> list[Tensor]:
    random = np.random.default_rng(seed)
    size = CHUNK_BYTES * 3 // 2
    return [Tensor(f"w{n}", "uint8", (size,), [memoryview(random.bytes(size))]) for n in range(tensors)]


class Learner:
    """The weights endpoint in a thread. `choose` names the source of a request: a Source, an Error, or None."""

    def __init__(self, folder: Path):
        self.publication = Publication("relays", folder)
        self.choose: Callable[[SourceRequest], Source | Error | None] = lambda request: None
        self.asked: list[SourceRequest] = []
        self.sent_bytes = 0
        self.pause_s = 0.0
        self._socket = LearnerSocket("tcp://127.0.0.1:0", WeightsFromServer, setting="port", linger_s=0)
        self.endpoint = self._socket.endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def publish(self, number: int, tensors: list[Tensor] | None = None) -> WeightManifest:
        return self.publication.publish(number, tensors or version(number))

    def _serve(self) -> None:
        while not self._stop.is_set():
            received = self._socket.recv(0.02)
            if not isinstance(received, Received):
                continue
            message = received.message
            if isinstance(message, SourceRequest):
                self.asked.append(message)
                answer: Source | Chunk | Error = self.choose(message) or Source(version=message.version)
            else:
                assert isinstance(message, ChunkRequest)
                time.sleep(self.pause_s)
                answer = answer_chunk_request(self.publication, message)
                self.sent_bytes += answer.data.nbytes if isinstance(answer, Chunk) else 0
            self._socket.send(received.identity, answer)
        self._socket.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.publication.close()


class Server:
    """Part of a rollout server that takes versions over ZeroMQ, without an engine."""

    def __init__(self, config: RunConfig, learner: Learner, name: str):
        self.name = name
        self.puller = RelayPuller(config.network, name)
        self._socket = ServerSocket(learner.endpoint, WeightsFromLearner, linger_s=0)

    async def get(self, manifest: WeightManifest) -> bytes:
        into = bytearray(manifest.total_bytes)
        async with asyncio.timeout(LONGEST_S):
            await self.puller.receive(self._socket, manifest, memoryview(into))
        return bytes(into)

    def source(self, number: int, **fields: Any) -> Source:
        """This server as a source, for another one."""
        relay = self.puller._relay
        assert relay is not None
        return Source(version=number, server_id=self.name, endpoint=relay.endpoint, key=relay.key, **fields)

    def close(self) -> None:
        self.puller.close()
        self._socket.close()


@asynccontextmanager
async def fleet(config: RunConfig, learner: Learner, size: int) -> AsyncIterator[list[Server]]:
    servers = [Server(config, learner, f"s{number}") for number in range(size)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def contents(learner: Learner, number: int) -> bytes:
    manifest = learner.publication.manifest(number)
    return bytes(learner.publication.read(number, 0, manifest.total_bytes))
