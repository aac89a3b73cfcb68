"""One policy version on its way into memory: what of it has come, was found right, and may be sent on.

A version may come from several senders, one after another: the learner, or servers that have it. What has arrived from
one stays when the next goes on. Each tensor is compared with the learner's checksum as soon as it is complete, and only
then may it be sent on.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Literal

import xxhash

from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Chunk, ChunkRequest, WeightManifest
from protocol.weight_file import check_manifest

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 * MIB
"""Bytes asked for at once. Smaller frames cost more time than their bytes do; 64 MiB ones are four times slower."""
MAX_CHUNK_BYTES = 4 * MIB
"""Largest chunk. Times the learner's queue for one peer (CHUNK_QUEUES) it bounds a stalled reader's cost: 256 MiB."""
ATTEMPTS = 2
"""Transfers of a tensor with a wrong checksum before the fetch fails."""
_NOTHING = xxhash.xxh3_64_intdigest(b"")

FailureReason = Literal["checksum", "silent", "gone"]


class SourceFailed(Exception):
    """Another server that was to send a version does not; `reason` is the wire's word, the text says what happened."""

    def __init__(self, reason: FailureReason, what: str):
        super().__init__(what)
        self.reason: FailureReason = reason


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
        self.on_verified: Callable[[], None] = lambda: None
        """Called when more tensors can be sent on."""
        self.received_bytes = 0
        """Bytes that have arrived, those that had to come again included."""
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

    def read(self, offset: int, nbytes: int) -> memoryview | None:
        """A view of these bytes; None while a tensor among them is not verified. Raises ProtocolError MALFORMED."""
        if offset < 0 or nbytes <= 0 or offset + nbytes > self._target.nbytes:
            raise ProtocolError(
                ErrorCode.MALFORMED,
                f"bytes {offset} to {offset + nbytes} of version {self.manifest.version}, which has "
                f"{self._target.nbytes} bytes",
            )
        if self._unverified and not all(self._verified[index] for index in self._tensors_in(offset, nbytes)):
            return None
        return self._target[offset : offset + nbytes]

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
        self.received_bytes += nbytes
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
        self.on_verified()

    def ask_again(self, relay: str) -> None:
        """Let tensors with wrong checksums come again. Raises SourceFailed where a `relay` sends, and ProtocolError
        MALFORMED at the learner's last try."""
        wrong, self._wrong = self._wrong, []
        if not wrong:
            return
        last = []
        for index in wrong:
            entry = self.manifest.tensors[index]
            self._left[index] = entry.nbytes
            self._chunks |= self._cut(entry.offset, entry.nbytes)
            self._attempts[index] += not relay
            if self._attempts[index] >= ATTEMPTS or not entry.nbytes:  # without bytes nothing can come again
                last.append(entry.name)
        names = sorted(self.manifest.tensors[index].name for index in wrong)
        logger.warning("version %d: wrong checksum of %s, fetched again", self.manifest.version, names)
        if relay:
            raise SourceFailed("checksum", f"version {self.manifest.version} from {relay}: wrong checksum of {names}")
        if last:
            raise ProtocolError(
                ErrorCode.MALFORMED,
                f"version {self.manifest.version}: {len(last)} tensors have wrong checksums after {ATTEMPTS} "
                f"transfers, first {last[0]!r}. The link or the learner's memory corrupts data",
            )

    def _cut(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Chunks of a range, each as offset and size."""
        end = offset + nbytes
        for start in range(offset, end, self._chunk_bytes):
            yield start, min(self._chunk_bytes, end - start)

    def _tensors_in(self, offset: int, nbytes: int) -> range:
        """Indices of the tensors with bytes in a range."""
        return range(bisect_right(self._ends, offset), bisect_left(self._starts, offset + nbytes))
