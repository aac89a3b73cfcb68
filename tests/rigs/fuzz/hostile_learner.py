"""A hostile learner, against the link and the weight transfer of a rollout server."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import xxhash
import zmq

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from protocol.codec import Limits, decode
from protocol.download import fetch
from protocol.errors import ProtocolError
from protocol.messages import (
    Chunk,
    ChunkRequest,
    TensorEntry,
    Tickets,
    WeightManifest,
    WeightsFromLearner,
    Welcome,
)
from protocol.sockets import ServerSocket
from protocol.weight_file import PublicationError, check_manifest, open_shm
from rollout_server.link import LearnerLink
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of, mutate
from tests.rigs.fuzz.rig import memory_mib, small_config

BATCH = 20
HEARD_S = 20.0
TRANSFER_BYTES = 64 * 1024
MOST_TRANSFERS = 20
CHUNK_BYTES = 4096
WELCOME = next(message for message in content.EXAMPLES if isinstance(message, Welcome))


async def fuzz_server_side(messages: int, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    hostile = _HostileLearner(seed)
    tenth = messages // 10
    try:
        await hostile.fuzz_link(tenth)
        rss_mib = [memory_mib()]
        await hostile.fuzz_link(messages - 2 * tenth)
        await hostile.fuzz_transfers(tenth)
    finally:
        hostile.control.close(linger=0)
        hostile.weights.close(linger=0)
    rss_mib.append(memory_mib())
    seconds = time.monotonic() - started
    return {"counts": hostile.counts, "rss_mib": rss_mib, "seconds": seconds, "problems": hostile.problems}


class _HostileLearner:
    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._config = small_config(start_timeout_s=HEARD_S)
        self.control = _router(self._config.network.control_endpoint)
        self.weights = _router(self._config.network.weights_endpoint)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def fuzz_link(self, messages: int) -> None:
        """Batches of damage, each closed by a valid ticket: the link must deliver that one."""
        link, identity = await self._connect(self._config)
        for first in range(0, messages, BATCH):
            batch = min(BATCH, messages - first)
            for _ in range(batch):
                self.control.send_multipart([identity, *mutate(self._rng, self._rng.choice(content.EXAMPLES))])
            self.counts["messages to the link"] += batch
            valid = content.ticket(10**6 + first, 0)
            self.control.send_multipart([identity, *frames_of(Tickets(tickets=(valid,)))])
            if not await self._is_delivered(link, valid.ticket_id):
                link.close()  # a refusal that is a valid one ends a server, and rightly so
                link, identity = await self._connect(self._config)
            while self.control.poll(0):
                self.control.recv_multipart()
        link.close()

    async def _connect(self, config: RunConfig) -> tuple[LearnerLink, bytes]:
        link = LearnerLink(
            config.link_settings, engine="scripted", fingerprints=(content.MODEL, content.PROCESSOR), in_work=tuple
        )
        connecting = asyncio.create_task(link.connect())
        identity, header = b"", b""
        while link.server_id.encode() not in header:  # what the one before it sent may still arrive
            assert not connecting.done(), "no hello"
            if self.control.poll(0):
                identity, header, *_ = self.control.recv_multipart()
            await asyncio.sleep(0.001)
        self.control.send_multipart([identity, *frames_of(WELCOME)])
        await connecting
        return link, identity

    async def _is_delivered(self, link: LearnerLink, ticket_id: int) -> bool:
        """Listen until that ticket arrives. False if a message of the batch rightly ended the conversation."""
        deadline = time.monotonic() + HEARD_S
        while time.monotonic() < deadline:
            try:
                message = await link.next_message()
            except (UserError, BadStateError) as ending:
                self.counts[f"conversations ended by {type(ending).__name__}"] += 1
                return False
            if isinstance(message, Tickets) and any(ticket.ticket_id == ticket_id for ticket in message.tickets):
                return True
            if isinstance(message, WeightManifest):
                self._open(message)
            self.counts["damaged messages that were still valid"] += message is not None
        self.problems.append(f"the link hangs: ticket {ticket_id} did not arrive within {HEARD_S:g} s")
        return False

    def _open(self, manifest: WeightManifest) -> None:
        for look in (check_manifest, open_shm):
            try:
                look(manifest)
            except (ProtocolError, PublicationError):
                self.counts["manifests refused"] += 1

    async def fuzz_transfers(self, messages: int) -> None:
        """Chunks are damaged on their way: what counts as arrived must still be right, or there is an error."""
        socket = ServerSocket(self._config.network.weights_endpoint, WeightsFromLearner, linger_s=0)
        weights = self._rng.randbytes(TRANSFER_BYTES)
        arrived = "transfers that arrived whole"
        # Most fail at this rate of damage: some more are begun until one has arrived.
        while self.counts["damaged chunks to the transfer"] < messages or (
            not self.counts[arrived] and self.counts["transfers"] < MOST_TRANSFERS
        ):
            self.counts["transfers"] += 1
            size = {"offset": 0, "nbytes": TRANSFER_BYTES, "xxh3": xxhash.xxh3_64_intdigest(weights)}
            whole = TensorEntry(name="w", dtype="uint8", shape=(TRANSFER_BYTES,), **size)
            names = {"version": self.counts["transfers"], "publication": "p"}
            manifest = WeightManifest(**names, tensors=(whole,), total_bytes=TRANSFER_BYTES, shm_path="")
            target = bytearray(TRANSFER_BYTES)
            fetching = fetch(socket, manifest, target, timeout_s=2.0, chunk_bytes=CHUNK_BYTES, retry_s=0.02)
            transfer = asyncio.create_task(fetching)
            while not transfer.done():
                self._answer_chunk_requests(weights)
                await asyncio.sleep(0.0005)
            try:
                transfer.result()
                self.counts[arrived] += 1
                if bytes(target) != weights:
                    self.problems.append(f"transfer {manifest.version} delivered wrong bytes")
            except (ProtocolError, TimeoutError) as refused:
                self.counts[f"transfers refused ({getattr(refused, 'code', 'timeout')})"] += 1
        socket.close()

    def _answer_chunk_requests(self, weights: bytes) -> None:
        """Damages most chunks, and lets some through so that a transfer can end."""
        while self.weights.poll(0):
            identity, *frames = self.weights.recv_multipart()
            request = decode(frames, (ChunkRequest,), Limits())
            assert isinstance(request, ChunkRequest)
            data = memoryview(weights)[request.offset : request.offset + request.nbytes]
            chunk = Chunk(version=request.version, offset=request.offset, data=data)
            is_damaged = self._rng.random() < 0.5
            self.counts["damaged chunks to the transfer" if is_damaged else "chunks left whole"] += 1
            answer = mutate(self._rng, chunk) if is_damaged else frames_of(chunk)
            self.weights.send_multipart([identity, *answer])


def _router(endpoint: str) -> zmq.Socket[bytes]:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDTIMEO, 10_000)
    router.bind(endpoint)
    return router
