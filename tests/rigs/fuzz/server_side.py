"""A rollout server's link and weight transfer against a hostile learner."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import xxhash
import zmq

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from protocol.codec import Limits, decode
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    Ack,
    Chunk,
    ChunkRequest,
    Error,
    Goodbye,
    LearnerHeartbeat,
    Refusal,
    TensorEntry,
    Tickets,
    WeightManifest,
    WeightsFromLearner,
    Welcome,
    Wire,
)
from protocol.sockets import ServerSocket
from protocol.transfer import fetch
from protocol.weight_file import PublicationError, check_manifest, open_shm
from rollout_server.link import LearnerLink
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of, mutate
from tests.rigs.fuzz.rig import memory_mib, small_config

BATCH = 20
HEARD_S = 20.0
TRANSFER_BYTES = 64 * 1024
CHUNK_BYTES = 4096


@dataclass
class ServerSideResult:
    counts: Counter[str] = field(default_factory=Counter)
    rss_mib: list[float] = field(default_factory=list)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


async def fuzz_server_side(messages: int, seed: int, *, slack_mib: float = 48.0) -> ServerSideResult:
    result = ServerSideResult()
    started = time.monotonic()
    rng = random.Random(seed)
    await _fuzz_link(messages // 10, rng, result)
    result.rss_mib.append(memory_mib())
    await _fuzz_link(messages - 2 * (messages // 10), rng, result)
    await _fuzz_transfer(messages // 10, rng, result)
    result.rss_mib.append(memory_mib())
    if result.rss_mib[1] - result.rss_mib[0] > slack_mib:
        result.problems.append(f"the server's memory grew from {result.rss_mib[0]:.0f} to {result.rss_mib[1]:.0f} MiB")
    result.seconds = time.monotonic() - started
    return result


def _router(endpoint: str) -> zmq.Socket[bytes]:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDTIMEO, 10_000)
    router.bind(endpoint)
    return router


# --- control -------------------------------------------------------------------------------------


async def _fuzz_link(messages: int, rng: random.Random, result: ServerSideResult) -> None:
    """Batches of damage, each closed by a valid ticket: the link must deliver that one."""
    config = small_config(start_timeout_s=HEARD_S)
    router = _router(config.control_endpoint)
    link, identity = await _connected_link(config, router)
    number = 0
    try:
        while messages > 0:
            number += 1
            batch = min(BATCH, messages)
            for _ in range(batch):
                router.send_multipart([identity, *mutate(rng, frames_of(_template(rng)))])
            messages -= batch
            result.counts["messages to the link"] += batch
            router.send_multipart([identity, *frames_of(Tickets(tickets=(content.ticket(10**6 + number, 0),)))])
            if not await _delivered(link, 10**6 + number, result):
                link.close()  # a refusal that is a valid one ends a server, and rightly so
                link, identity = await _connected_link(config, router)
            while router.poll(0):
                router.recv_multipart()
    finally:
        link.close()
        router.close()


async def _connected_link(config: RunConfig, router: zmq.Socket[bytes]) -> tuple[LearnerLink, bytes]:
    link = LearnerLink(config, engine="scripted", fingerprints=(content.MODEL, content.PROCESSOR), in_work=tuple)
    task = asyncio.create_task(link.connect())
    deadline = time.monotonic() + HEARD_S
    identity, header = b"", b""
    while link.server_id.encode() not in header:  # what the one before it sent may still arrive
        assert time.monotonic() < deadline, "no hello"
        if router.poll(0):
            identity, header, *_ = router.recv_multipart()
        else:
            await asyncio.sleep(0.001)
    router.send_multipart([identity, *frames_of(_welcome())])
    await task
    return link, identity


async def _delivered(link: LearnerLink, ticket_id: int, result: ServerSideResult) -> bool:
    """Listen until that ticket arrives. False if a message of the batch rightly ended the conversation."""
    deadline = time.monotonic() + HEARD_S
    while time.monotonic() < deadline:
        try:
            message = await link.next_message()
        except (UserError, BadStateError) as ending:
            result.counts[f"conversations ended by {type(ending).__name__}"] += 1
            return False
        if isinstance(message, Tickets) and any(t.ticket_id == ticket_id for t in message.tickets):
            return True
        if isinstance(message, WeightManifest):
            _check(message, result)
        if message is not None:
            result.counts["damaged messages that were still valid"] += 1
    result.problems.append(f"the link hangs: ticket {ticket_id} did not arrive within {HEARD_S:g} s")
    return False


def _check(manifest: WeightManifest, result: ServerSideResult) -> None:
    for look in (check_manifest, open_shm):
        try:
            look(manifest)
        except (ProtocolError, PublicationError):
            result.counts["manifests refused"] += 1


def _welcome() -> Welcome:
    where = {"run_id": "fuzz", "incarnation": "i", "host_id": "h", "weights_port": 1}
    return Welcome(**where, version=0, heartbeat_s=1, timeout_s=5)


def _manifest(version: int, xxh3: int = 0, shm_path: str = "/dev/shm/x") -> WeightManifest:
    size = TRANSFER_BYTES
    entry = TensorEntry(name="w", dtype="uint8", shape=(size,), offset=0, nbytes=size, xxh3=xxh3)
    return WeightManifest(version=version, publication="p", tensors=(entry,), total_bytes=size, shm_path=shm_path)


def _template(rng: random.Random) -> Wire:
    ticket_id = rng.randrange(1000)
    digest, data = content.image(ticket_id % 50)
    tickets = Tickets(tickets=(content.ticket(ticket_id, 0),), blobs={digest: memoryview(data)})
    return rng.choice(
        (
            *(tickets, tickets, _welcome(), _manifest(ticket_id)),
            Refusal(code=ErrorCode.MODEL_MISMATCH, reason="reason", fix="fix"),
            Tickets(tickets=tuple(content.ticket(i, 0) for i in range(5))),
            Ack(ticket_ids=(ticket_id, ticket_id + 1)),
            LearnerHeartbeat(version=1, step=1),
            Goodbye(reason="reason"),
            Error(code=ErrorCode.NOT_WELCOME, reason="reason"),
            Chunk(version=0, offset=0, data=memoryview(b"x" * 100)),
        )
    )


# --- weights -------------------------------------------------------------------------------------


async def _fuzz_transfer(messages: int, rng: random.Random, result: ServerSideResult) -> None:
    """Chunks are damaged on their way; the bytes that count as arrived must still be the right ones, or an error."""
    endpoint = small_config().weights_endpoint
    router = _router(endpoint)
    socket = ServerSocket(endpoint, WeightsFromLearner, linger_s=0)
    weights = rng.randbytes(TRANSFER_BYTES)
    sent = 0
    version = 0
    try:
        while sent < messages:
            version += 1
            manifest = _manifest(version, xxhash.xxh3_64_intdigest(weights), shm_path="")
            target = bytearray(TRANSFER_BYTES)
            transfer = asyncio.create_task(
                fetch(socket, manifest, target, timeout_s=5.0, chunk_bytes=CHUNK_BYTES, retry_s=0.02)
            )
            while not transfer.done():
                sent += _answer_hostilely(router, weights, rng, result)
                await asyncio.sleep(0.0005)
            try:
                transfer.result()
                result.counts["transfers that arrived whole"] += 1
                if bytes(target) != weights:
                    result.problems.append(f"transfer {version} delivered wrong bytes")
            except (ProtocolError, TimeoutError) as refused:
                result.counts[f"transfers refused ({getattr(refused, 'code', 'timeout')})"] += 1
        result.counts["damaged chunks to the transfer"] += sent
    finally:
        socket.close()
        router.close()


def _answer_hostilely(router: zmq.Socket[bytes], weights: bytes, rng: random.Random, result: ServerSideResult) -> int:
    """Damages most chunks, and lets some through so that a transfer can end. Returns the number of the former."""
    damaged = 0
    while router.poll(0):
        identity, *frames = router.recv_multipart()
        request = decode(frames, (ChunkRequest,), Limits())
        assert isinstance(request, ChunkRequest)
        data = weights[request.offset : request.offset + request.nbytes]
        answer = frames_of(Chunk(version=request.version, offset=request.offset, data=memoryview(data)))
        if rng.random() < 0.7:
            answer = mutate(rng, answer)
            damaged += 1
        else:
            result.counts["chunks left whole"] += 1
        router.send_multipart([identity, *answer])
    return damaged
