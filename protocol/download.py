"""Pulling one policy version over ZeroMQ: a window of chunk requests, sent again after losses, and their answers.

Each tensor is compared with the learner's checksum as soon as it is complete; a wrong one comes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator

import xxhash

from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Chunk, ChunkRequest, Error, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from protocol.weight_file import check_manifest
from protocol.weights import Publication

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 * MIB
"""Bytes asked for at once. Smaller frames cost more time than their bytes do; 64 MiB ones are four times slower."""
MAX_CHUNK_BYTES = 4 * MIB
"""Largest chunk. Times the learner's queue for one peer (CHUNK_QUEUES) it bounds a stalled reader's cost: 256 MiB."""
ATTEMPTS = 2
"""Transfers of a tensor with a wrong checksum before the fetch fails."""
_NOTHING = xxhash.xxh3_64_intdigest(b"")
WINDOW = 16
"""Most chunks on their way at a time: enough to keep both sides and the network busy at once."""
FIRST_WINDOW = 2
QUICK_SHARE = 0.25
"""Share of RETRY_S within which a chunk comes where nothing queues: each such one allows one more on its way."""
RETRY_S = 2.0
"""Seconds without any chunk after which requests are sent again, at least: a slow link is given longer."""
PATIENCE, MOST_PATIENCE = 2.0, 0.25
"""Times what a chunk took that is waited for the next one, and the most of that, as a share of the deadline."""


class Download:
    """One version on its way into memory. Belongs to one event loop."""

    def __init__(
        self,
        manifest: WeightManifest,
        into: bytearray | memoryview,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        """`into` has exactly `manifest.total_bytes`. Raises ProtocolError for a manifest that contradicts itself."""
        check_manifest(manifest)
        self._target = memoryview(into).cast("B")
        if self._target.nbytes != manifest.total_bytes:
            raise ValueError(f"the target has {self._target.nbytes} bytes, the publication {manifest.total_bytes}")
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, the learner sends at most {MAX_CHUNK_BYTES}")
        self.manifest = manifest
        self._chunk_bytes = chunk_bytes
        self._starts = [entry.offset for entry in manifest.tensors]
        self._ends = [entry.offset + entry.nbytes for entry in manifest.tensors]
        self._left = [entry.nbytes for entry in manifest.tensors]
        """Bytes of each tensor that have not arrived."""
        self._attempts = [0] * len(manifest.tensors)
        # Tensors without bytes have nothing to wait for.
        self._verified = [not entry.nbytes and entry.xxh3 == _NOTHING for entry in manifest.tensors]
        self._unverified = self._verified.count(False)
        self._chunks = dict(self._cut(0, manifest.total_bytes))
        """Offset and size of what has not arrived."""
        self._total = len(self._chunks)
        self._checks: set[asyncio.Task[None]] = set()
        self._wrong: list[int] = []
        """Tensors that were found wrong and not yet asked for again."""

    @property
    def is_complete(self) -> bool:
        """True when every tensor is there and has its checksum."""
        return not self._unverified

    def missing(self) -> dict[int, int]:
        """Offset and size of each chunk that has not arrived."""
        return self._chunks

    def progress(self) -> str:
        return f"{len(self._chunks)} of {self._total} chunks of version {self.manifest.version} are missing"

    def request(self, offset: int) -> ChunkRequest:
        """The request for a chunk that is missing."""
        return ChunkRequest(
            version=self.manifest.version,
            publication=self.manifest.publication,
            offset=offset,
            nbytes=self._chunks[offset],
        )

    def take(self, chunk: Chunk) -> bool:
        """Put a chunk in its place; False for a late answer to an earlier request, or one that was sent twice.

        Tensors that it completes are checked.
        """
        offset, nbytes = chunk.offset, chunk.data.nbytes
        if self._chunks.get(offset) != nbytes:
            return False
        crash_point("weights.fetching")
        del self._chunks[offset]
        self._target[offset : offset + nbytes] = chunk.data
        complete = []
        for index in self._tensors_in(offset, nbytes):
            start, end = max(offset, self._starts[index]), min(offset + nbytes, self._ends[index])
            if not self._verified[index] and end > start:
                self._left[index] -= end - start
                if not self._left[index]:
                    complete.append(index)
        if complete:
            self._check(complete)
        return True

    async def check_rest(self) -> None:
        """Check the rest: wait for checks that are under way; without any, begin those of tensors for which nothing had
        to come."""
        if self._checks:
            await asyncio.wait(self._checks, return_when=asyncio.FIRST_COMPLETED)
        else:
            self._check([index for index, left in enumerate(self._left) if not left and not self._verified[index]])

    def _check(self, indices: list[int]) -> None:
        """Compare these tensors with their checksums, in a thread: the rest goes on arriving."""
        for index in indices:
            self._left[index] = -1  # being checked: not to be checked twice
        task = asyncio.create_task(self._verify(indices))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _verify(self, indices: list[int]) -> None:
        entries = [self.manifest.tensors[index] for index in indices]
        pieces = [self._target[entry.offset : entry.offset + entry.nbytes] for entry in entries]
        sums = await asyncio.to_thread(lambda: [xxhash.xxh3_64_intdigest(piece) for piece in pieces])
        for index, entry, checksum in zip(indices, entries, sums, strict=True):
            self._left[index] = 0
            if checksum == entry.xxh3:
                self._verified[index] = True
                self._unverified -= 1
            else:
                self._wrong.append(index)

    def ask_again(self, *, counts: bool = True) -> list[str]:
        """Let tensors with wrong checksums come again, and return their names.

        `counts`: this try was one of the ATTEMPTS after which ProtocolError MALFORMED is raised.
        """
        wrong, self._wrong = self._wrong, []
        last: list[str] = []
        for index in wrong:
            entry = self.manifest.tensors[index]
            self._left[index] = entry.nbytes
            self._chunks |= self._cut(entry.offset, entry.nbytes)
            self._attempts[index] += counts
            if self._attempts[index] >= ATTEMPTS or not entry.nbytes:  # without bytes nothing can come again
                last.append(entry.name)
        names = sorted(self.manifest.tensors[index].name for index in wrong)
        if names:
            logger.warning("version %d: wrong checksum of %s, fetched again", self.manifest.version, names)
        if last and counts:
            raise ProtocolError(
                ErrorCode.MALFORMED,
                f"version {self.manifest.version}: {len(last)} tensors have wrong checksums after {ATTEMPTS} "
                f"transfers, first {last[0]!r}. The link or the learner's memory corrupts data",
            )
        return names

    def _cut(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Chunks of a range, each as offset and size."""
        end = offset + nbytes
        for start in range(offset, end, self._chunk_bytes):
            yield start, min(self._chunk_bytes, end - start)

    def _tensors_in(self, offset: int, nbytes: int) -> range:
        """Indices of the tensors with bytes in a range."""
        return range(bisect_right(self._ends, offset), bisect_left(self._starts, offset + nbytes))


def answer_chunk_request(publication: Publication, request: ChunkRequest) -> Chunk | Error:
    """The learner's answer: the bytes, or the reason why not."""
    try:
        check_size(request)
        publication.check_is_meant(request.publication)
        data = publication.read(request.version, request.offset, request.nbytes)
    except ProtocolError as error:
        return Error(code=error.code, reason=error.reason, version=request.version)
    return Chunk(version=request.version, offset=request.offset, data=data)


def check_size(request: ChunkRequest) -> None:
    """Raise ProtocolError TOO_LARGE for a chunk over the limit."""
    if request.nbytes > MAX_CHUNK_BYTES:
        raise ProtocolError(
            ErrorCode.TOO_LARGE, f"a chunk of {request.nbytes:,} bytes, the limit is {MAX_CHUNK_BYTES:,}"
        )


async def fetch(
    socket: ServerSocket,
    manifest: WeightManifest,
    into: bytearray | memoryview,
    *,
    timeout_s: float,
    chunk_bytes: int = CHUNK_BYTES,
    window: int = WINDOW,
    retry_s: float = RETRY_S,
) -> None:
    """Fill `into` (exactly `manifest.total_bytes` long) with the version that `manifest` describes, from the learner.

    Raises as `Pull.run` does.
    """
    download = Download(manifest, into, chunk_bytes=chunk_bytes)
    await Pull(download, socket, timeout_s=timeout_s, window=window, retry_s=retry_s).run()


class Pull:
    """Requests for a version to one sender, and what they came to.

    Requests without an answer are sent again when nothing has arrived for `retry_s`, and only those.
    """

    unsent_level = logging.WARNING
    """Level of the log line about a request that could not be sent."""

    def __init__(
        self,
        download: Download,
        socket: ServerSocket,
        *,
        timeout_s: float,
        window: int = WINDOW,
        retry_s: float = RETRY_S,
    ):
        self.download, self.socket, self.timeout_s = download, socket, timeout_s
        self._window, self.retry_s = window, min(retry_s, timeout_s)
        self.arrived_at = self._moved_at = self._asked_at = self.heard_at = time.monotonic()
        self._allowed = FIRST_WINDOW
        """Chunks that may be on their way: fewer where one takes long, since others wait in the sender's queue, too."""
        self._asked: dict[int, float] = {}
        """Offsets on their way, in the order in which they were asked for, and when that was."""
        self._asked_twice: set[int] = set()
        """Requests whose answer does not say how long it took: it may belong to the first of two."""
        self._patience_s = self.retry_s
        """Seconds without any chunk after which requests are sent again."""
        self._waiting: deque[int] = deque(download.missing())

    async def run(self) -> None:
        """Fetch what is missing. Returns when all of it is there and verified.

        Raises ProtocolError VERSION_GONE if the learner has moved on, MALFORMED for tensors that stay wrong, and
        TimeoutError if nothing arrives for `timeout_s`.
        """
        while not self.download.is_complete:
            if self.download.missing():
                await self._exchange()
            else:
                await self.download.check_rest()
            self.ask_again()

    async def _exchange(self) -> None:
        """Ask for as much as the window allows, and take one message."""
        missing = self.download.missing()
        if not self._waiting and len(self._asked) < len(missing):  # what was wrong comes again
            self._waiting.extend(offset for offset in missing if offset not in self._asked)
        await self._ask(missing)
        message = await self.socket.recv(self.retry_s if self._asked else 0.0)
        now = time.monotonic()
        if message is not None:
            self.heard_at = now
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.version in (None, self._version):
            self.take_error(message)
        elif isinstance(message, Chunk) and message.version == self._version:
            self._moved_at = now
            if self.download.take(message):
                self.arrived_at = now
                self._pace(message.offset, now)
        # Not while others arrive: a slow link may take longer for one.
        if now - max(self._moved_at, self._asked_at) >= self._patience_s:
            self._waiting.extendleft(reversed(self._asked))
            self._asked_twice |= self._asked.keys()
            self._asked.clear()
            self._asked_at, self._allowed = now, 1
            self._wait_for(PATIENCE * self._patience_s)
        self.check_deadlines(now)

    def _pace(self, offset: int, now: float) -> None:
        """Ask for more, or less, at a time, by how long a chunk has taken."""
        asked_at = self._asked.pop(offset, None)
        if asked_at is None or offset in self._asked_twice:
            self._allowed = max(1, self._allowed // 2)
            return
        is_quick = now - asked_at < QUICK_SHARE * self.retry_s
        self._allowed = min(self._window, self._allowed + 1) if is_quick else max(1, self._allowed // 2)
        self._wait_for(PATIENCE * (now - asked_at))

    def _wait_for(self, seconds: float) -> None:
        self._patience_s = max(self.retry_s, min(seconds, MOST_PATIENCE * self.timeout_s))

    @property
    def _version(self) -> int:
        return self.download.manifest.version

    async def _ask(self, missing: dict[int, int]) -> None:
        while self._waiting and len(self._asked) < self._allowed:
            offset = self._waiting[0]
            if offset not in missing:  # it has come after all
                self._waiting.popleft()
                continue
            try:
                await self.socket.send(self.download.request(offset), timeout_s=self.retry_s)
            except SendTimeout as problem:
                logger.log(self.unsent_level, "%s; trying again", problem)
                return
            self._asked[self._waiting.popleft()] = time.monotonic()

    def ask_again(self) -> None:
        """Let what came with wrong checksums come again. Raises ProtocolError MALFORMED at the last try."""
        self.download.ask_again()

    def take_error(self, error: Error) -> None:
        """Raise ProtocolError with the learner's answer."""
        raise ProtocolError(error.code, error.reason)

    def check_deadlines(self, now: float) -> None:
        """Raise TimeoutError if nothing has arrived for `timeout_s`."""
        if now - self.arrived_at >= self.timeout_s:
            raise TimeoutError(
                f"no weights arrived for {self.timeout_s:g} s from the learner at {self.socket.endpoint}: "
                f"{self.download.progress()}"
            )
