"""Pulling one policy version over ZeroMQ: a window of chunk requests, resumed after losses, checksummed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Chunk, ChunkRequest, Error, TensorEntry, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from protocol.weight_file import check_manifest
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
_STEP_BYTES = 8 << 20
"""Most bytes of one checksum step between two messages."""


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
    pull = _Pull(socket, manifest, target, timeout_s, window, min(retry_s, timeout_s))
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
    """Cut `ranges` of (offset, size) into pieces: offset to size."""
    return {
        start: min(chunk_bytes, offset + nbytes - start)
        for offset, nbytes in ranges
        for start in range(offset, offset + nbytes, chunk_bytes)
    }


class RunningChecksums:
    """Checksums of a publication's tensors, computed front to back while their bytes arrive."""

    def __init__(self, entries: Sequence[TensorEntry], target: memoryview):
        self._entries = sorted(entries, key=lambda entry: entry.offset)
        self._target = target
        self._index = 0
        self._done = 0  # bytes of the current tensor
        self._hash = xxhash.xxh3_64()
        self.wrong: list[str] = []
        """Names of complete tensors whose checksum is not the manifest's."""

    def advance(self, end: int, most: int = _STEP_BYTES) -> None:
        """Read bytes that have arrived (all before `end`); at most `most`, because the event loop waits meanwhile."""
        while self._index < len(self._entries) and most > 0:
            entry = self._entries[self._index]
            nbytes = min(end - entry.offset, entry.nbytes) - self._done
            nbytes = min(nbytes, most)
            if nbytes > 0:
                start = entry.offset + self._done
                self._hash.update(self._target[start : start + nbytes])
                self._done += nbytes
                most -= nbytes
            if self._done < entry.nbytes or end < entry.offset + entry.nbytes:
                return
            if self._hash.intdigest() != entry.xxh3:
                self.wrong.append(entry.name)
            self._index, self._done = self._index + 1, 0
            self._hash.reset()

    def finish(self) -> list[str]:
        """Read the rest once everything has arrived, and return the names of wrong tensors."""
        self.advance(self._target.nbytes, most=self._target.nbytes + 1)
        return self.wrong


@dataclass(frozen=True)
class _Pull:
    """Requests chunks of one version, at most `window` at a time."""

    socket: ServerSocket
    manifest: WeightManifest
    target: memoryview
    timeout_s: float
    window: int
    retry_s: float

    async def run(self, chunks: dict[int, int], checksums: RunningChecksums) -> None:
        """Return when all `chunks` (offset to size, in ascending order) lie in the target."""
        waiting, unread = deque(chunks), deque(chunks)
        asked: dict[int, float] = {}
        total = len(chunks)
        progress_at = time.monotonic()
        while chunks:
            while waiting and len(asked) < self.window:
                offset = waiting.popleft()
                if not await self._ask(offset, chunks[offset]):
                    waiting.appendleft(offset)
                    break
                asked[offset] = time.monotonic()
            chunk = await self._receive(self.retry_s if asked else 0.0)
            now = time.monotonic()
            if chunk is not None and self._store(chunk, chunks):
                crash_point("weights.fetching")
                asked.pop(chunk.offset, None)
                progress_at = now
                while unread and unread[0] not in chunks:
                    unread.popleft()
                checksums.advance(unread[0] if unread else self.target.nbytes)
                continue
            # Not while others arrive: over a slow link an answer may be on its way for longer.
            overdue = [offset for offset, asked_at in asked.items() if now - max(asked_at, progress_at) >= self.retry_s]
            for offset in reversed(overdue):
                del asked[offset]
                waiting.appendleft(offset)
            if now - progress_at >= self.timeout_s:
                raise TimeoutError(
                    f"no weights arrived for {self.timeout_s:g} s from the learner at "
                    f"{self.socket.endpoint}: {len(chunks)} of {total} chunks of version "
                    f"{self.manifest.version} are missing"
                )

    async def _ask(self, offset: int, nbytes: int) -> bool:
        request = ChunkRequest(
            version=self.manifest.version, publication=self.manifest.publication, offset=offset, nbytes=nbytes
        )
        try:
            await self.socket.send(request, timeout_s=self.retry_s)
        except SendTimeout as problem:
            logger.warning("%s; trying again", problem)
            return False
        return True

    async def _receive(self, timeout_s: float) -> Chunk | None:
        message = await self.socket.recv(timeout_s)
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.version in (None, self.manifest.version):
            raise ProtocolError(message.code, message.reason)
        elif isinstance(message, Chunk):
            return message
        return None

    def _store(self, chunk: Chunk, missing: dict[int, int]) -> bool:
        """Copy the chunk into the target; False for a late answer to an earlier request or to one sent twice."""
        nbytes = missing.get(chunk.offset)
        if chunk.version != self.manifest.version or nbytes is None or chunk.data.nbytes != nbytes:
            return False
        self.target[chunk.offset : chunk.offset + nbytes] = chunk.data
        del missing[chunk.offset]
        return True
