"""Pulling one policy version over ZeroMQ: a window of chunk requests, resumed after losses, checksummed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from protocol.arrival import RunningChecksums
from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Chunk, ChunkRequest, Error, WeightManifest
from protocol.shm import check_manifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from protocol.weights import Publication

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 * MIB
"""Smaller frames cost more time each than their bytes do; frames of 64 MiB are slower by a factor of four."""
WINDOW = 16
"""Chunks on their way at a time: enough to keep both sides and the network busy at once."""
MAX_CHUNK_BYTES = 4 * MIB
"""Times the learner's queue for one peer (CHUNK_QUEUES) this is what a reader that stalls can make it hold: 256 MiB."""
ATTEMPTS = 2
"""How often a tensor may arrive with a wrong checksum before we give up."""


def answer_chunk_request(publication: Publication, request: ChunkRequest) -> Chunk | Error:
    """The learner's side."""
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
    pull = _Pull(socket, manifest, target, timeout_s, window, retry_s)
    tensors = manifest.tensors
    ranges = [(0, manifest.total_bytes)]
    for _attempt in range(ATTEMPTS):
        checksums = RunningChecksums(tensors, target)
        await pull.run(_chunks(ranges, chunk_bytes), checksums)
        # After a lost chunk gigabytes may be left to read, in which the event loop has other work.
        wrong = set(await asyncio.to_thread(checksums.finish))
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


def _chunks(ranges: list[tuple[int, int]], chunk_bytes: int) -> dict[int, int]:
    """Offset to size of the pieces that cover `ranges` of (offset, size)."""
    return {
        start: min(chunk_bytes, offset + nbytes - start)
        for offset, nbytes in ranges
        for start in range(offset, offset + nbytes, chunk_bytes)
    }


class _Pull:
    """Requests chunks of one version, at most `window` at a time."""

    def __init__(
        self,
        socket: ServerSocket,
        manifest: WeightManifest,
        target: memoryview,
        timeout_s: float,
        window: int,
        retry_s: float,
    ):
        self._socket = socket
        self._version = manifest.version
        self._publication = manifest.publication
        self._target = target
        self._timeout_s = timeout_s
        self._window = window
        self._retry_s = min(retry_s, timeout_s)

    async def run(self, chunks: dict[int, int], checksums: RunningChecksums) -> None:
        """Returns when all `chunks` (offset to size, in ascending order) lie in the target."""
        waiting, unread = deque(chunks), deque(chunks)
        asked: dict[int, float] = {}
        total = len(chunks)
        progress_at = time.monotonic()
        while chunks:
            while waiting and len(asked) < self._window:
                offset = waiting.popleft()
                if not await self._ask(offset, chunks[offset]):
                    waiting.appendleft(offset)
                    break
                asked[offset] = time.monotonic()
            chunk = await self._receive(self._retry_s if asked else 0.0)
            now = time.monotonic()
            if chunk is not None and self._store(chunk, chunks):
                crash_point("weights.fetching")
                asked.pop(chunk.offset, None)
                progress_at = now
                while unread and unread[0] not in chunks:
                    unread.popleft()
                checksums.advance(unread[0] if unread else self._target.nbytes)
                continue
            # Not while others arrive: over a slow link an answer may be on its way for longer.
            overdue = [
                offset for offset, asked_at in asked.items() if now - max(asked_at, progress_at) >= self._retry_s
            ]
            for offset in reversed(overdue):
                del asked[offset]
                waiting.appendleft(offset)
            if now - progress_at >= self._timeout_s:
                raise TimeoutError(
                    f"no weights arrived for {self._timeout_s:g} s from the learner at "
                    f"{self._socket.endpoint}: {len(chunks)} of {total} chunks of version "
                    f"{self._version} are missing"
                )

    async def _ask(self, offset: int, nbytes: int) -> bool:
        request = ChunkRequest(version=self._version, publication=self._publication, offset=offset, nbytes=nbytes)
        try:
            await self._socket.send(request, timeout_s=self._retry_s)
        except SendTimeout as problem:
            logger.warning("%s; trying again", problem)
            return False
        return True

    async def _receive(self, timeout_s: float) -> Chunk | None:
        message = await self._socket.recv(timeout_s)
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.version in (None, self._version):
            raise ProtocolError(message.code, message.reason)
        elif isinstance(message, Chunk):
            return message
        return None

    def _store(self, chunk: Chunk, missing: dict[int, int]) -> bool:
        """False for what is not wanted: a late answer to an earlier request or to one that was sent twice."""
        nbytes = missing.get(chunk.offset)
        if chunk.version != self._version or nbytes is None or chunk.data.nbytes != nbytes:
            return False
        self._target[chunk.offset : chunk.offset + nbytes] = chunk.data
        del missing[chunk.offset]
        return True
