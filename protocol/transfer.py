"""Pulling one policy version over ZeroMQ: a window of chunk requests, resumed after losses, checksummed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Chunk, ChunkRequest, Error, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from protocol.weight_file import check_manifest, wrong_checksums
from protocol.weights import Publication

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 * MIB
"""Bytes asked for at once. Smaller frames cost more time than their bytes do; 64 MiB ones are four times slower."""
WINDOW = 16
"""Chunks on their way at a time: enough to keep both sides and the network busy at once."""
MAX_CHUNK_BYTES = 4 * MIB
"""Largest chunk. Times the learner's queue for one peer (CHUNK_QUEUES) it bounds a stalled reader's cost: 256 MiB."""
ATTEMPTS = 2
"""Transfers of a tensor with a wrong checksum before the fetch fails."""


def answer_chunk_request(publication: Publication, request: ChunkRequest) -> Chunk | Error:
    """The learner's answer: the bytes, or the reason why not."""
    try:
        if request.nbytes > MAX_CHUNK_BYTES:
            raise ProtocolError(
                ErrorCode.TOO_LARGE, f"a chunk of {request.nbytes:,} bytes, the limit is {MAX_CHUNK_BYTES:,}"
            )
        publication.check_is_meant(request.publication)
        data = publication.read(request.version, request.offset, request.nbytes)
    except ProtocolError as error:
        return Error(code=error.code, reason=error.reason, version=request.version)
    return Chunk(version=request.version, offset=request.offset, data=data)


async def fetch(
    socket: ServerSocket,
    manifest: WeightManifest,
    into: bytearray | memoryview,
    *,
    timeout_s: float,
    chunk_bytes: int = CHUNK_BYTES,
    window: int = WINDOW,
    retry_s: float = 2.0,
) -> None:
    """Fill `into` (exactly `manifest.total_bytes` long) with the version that `manifest` describes.

    Requests without an answer are sent again when nothing has arrived for `retry_s`, and only those: what has
    arrived stays. Raises ProtocolError VERSION_GONE if the learner has moved on, and TimeoutError if nothing arrives
    for `timeout_s`.
    """
    check_manifest(manifest)
    target = memoryview(into).cast("B")
    if target.nbytes != manifest.total_bytes:
        raise ValueError(f"the target has {target.nbytes} bytes, the publication {manifest.total_bytes}")
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, the learner sends at most {MAX_CHUNK_BYTES}")
    tensors = manifest.tensors
    ranges = [(0, manifest.total_bytes)]
    for _attempt in range(ATTEMPTS):
        chunks = {
            start: min(chunk_bytes, offset + nbytes - start)
            for offset, nbytes in ranges
            for start in range(offset, offset + nbytes, chunk_bytes)
        }
        await _pull(socket, manifest, target, chunks, timeout_s, window, min(retry_s, timeout_s))
        wrong = await asyncio.to_thread(wrong_checksums, tensors, target)
        if not wrong:
            return
        logger.warning("version %d: wrong checksum of %s, fetched again", manifest.version, sorted(wrong))
        tensors = tuple(tensor for tensor in tensors if tensor.name in wrong)
        ranges = [(tensor.offset, tensor.nbytes) for tensor in tensors]
    raise ProtocolError(
        ErrorCode.MALFORMED,
        f"version {manifest.version}: {len(tensors)} tensors have wrong checksums after {ATTEMPTS} "
        f"transfers, first {tensors[0].name!r}. The link or the learner's memory corrupts data",
    )


async def _pull(
    socket: ServerSocket,
    manifest: WeightManifest,
    target: memoryview,
    missing: dict[int, int],
    timeout_s: float,
    window: int,
    retry_s: float,
) -> None:
    """Request the `missing` chunks (offset to size), at most `window` at a time, until all lie in the target."""
    version, total = manifest.version, len(missing)
    waiting, asked = deque(missing), deque[int]()
    arrived_at = asked_at = time.monotonic()
    while missing:
        while waiting and len(asked) < window:
            offset = waiting[0]
            request = ChunkRequest(
                version=version, publication=manifest.publication, offset=offset, nbytes=missing[offset]
            )
            try:
                await socket.send(request, timeout_s=retry_s)
            except SendTimeout as problem:
                logger.warning("%s; trying again", problem)
                break
            asked.append(waiting.popleft())
        message = await socket.recv(retry_s if asked else 0.0)
        now = time.monotonic()
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.version in (None, version):
            raise ProtocolError(message.code, message.reason)
        elif isinstance(message, Chunk) and message.version == version:
            offset, data = message.offset, message.data
            if missing.get(offset) == data.nbytes:  # else a late answer to an earlier request, or one sent twice
                crash_point("weights.fetching")
                target[offset : offset + data.nbytes] = data
                del missing[offset]
                (asked if offset in asked else waiting).remove(offset)
                arrived_at = now
                continue
        if now - max(arrived_at, asked_at) >= retry_s:  # not while others arrive: a slow link may take longer for one
            waiting.extendleft(reversed(asked))
            asked.clear()
            asked_at = now
        if now - arrived_at >= timeout_s:
            raise TimeoutError(
                f"no weights arrived for {timeout_s:g} s from the learner at {socket.endpoint}: "
                f"{len(missing)} of {total} chunks of version {version} are missing"
            )
