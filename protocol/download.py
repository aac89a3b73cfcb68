"""One policy version on its way into memory: what of it has come, was found right, and may be sent on.

A version may come from several senders, one after another: the learner, or servers that have it. What has arrived from
one stays when the next goes on. Each tensor is compared with the learner's checksum as soon as it is complete, and only
then may it be sent on. Chunks may come as differences from a version that is here already.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal

import xxhash

from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Chunk, ChunkRequest, WeightManifest
from protocol.weight_deltas import element_bytes, unpack
from protocol.weight_file import check_manifest

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 * MIB
"""Bytes asked for at once. Smaller frames cost more time than their bytes do; 64 MiB ones are four times slower."""
MAX_CHUNK_BYTES = 4 * MIB
"""Largest chunk. Times the learner's queue for one peer (CHUNK_QUEUES) it bounds a stalled reader's cost: 256 MiB."""
ATTEMPTS = 2
"""Transfers of a tensor with a wrong checksum before the fetch fails."""
_OWN_BASE = " "
"""The version before, in the place of a sender of wrong bytes: it is no server's id."""
_NOTHING = xxhash.xxh3_64_intdigest(b"")

FailureReason = Literal["checksum", "silent", "slow", "gone"]


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
        base: Download | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        """`into` has exactly `manifest.total_bytes`. `base`: a version that is here whole, and stays as it is.

        Raises ProtocolError for a manifest that contradicts itself.
        """
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
        self.saved_bytes = 0
        """Bytes that differences have spared."""
        self.base_version: int | None = None
        """Version from which differences are asked for."""
        self.keeps_differences = False
        """Whether differences are kept, for others that have the same base."""
        self._chunk_bytes = chunk_bytes
        self._starts = [entry.offset for entry in manifest.tensors]
        self._ends = [entry.offset + entry.nbytes for entry in manifest.tensors]
        self._left = [entry.nbytes for entry in manifest.tensors]
        """Bytes of each tensor that have not arrived."""
        self._senders: list[set[str]] = [set() for _ in manifest.tensors]
        """Senders of bytes of each tensor, since it was last found wrong."""
        self._attempts = [0] * len(manifest.tensors)
        # Tensors without bytes have nothing to wait for.
        self._verified = [not entry.nbytes and entry.xxh3 == _NOTHING for entry in manifest.tensors]
        self._unverified = self._verified.count(False)
        self._chunks = dict(self._cut(0, manifest.total_bytes))
        """Offset and size of what has not arrived."""
        self._total = len(self._chunks)
        self._base: Download | None = None
        """Gone when this version is complete."""
        self._width = 0
        self._as_difference: set[int] = set()
        """Offsets of chunks that may still come as differences: what was wrong comes plain."""
        self._differences: dict[int, bytes] = {}
        """Differences that have arrived, by offset."""
        self._refused: list[tuple[str, str]] = []
        """Senders of what was no difference, and why."""
        if base is not None and base.is_complete and chunk_bytes == CHUNK_BYTES:
            self._width = element_bytes(base.manifest, manifest)
            if self._width:
                self._base, self.base_version = base, base.manifest.version
                self._as_difference = set(self._chunks)
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

    def answer(self, request: ChunkRequest) -> Chunk | None:
        """The bytes, or their difference from a version that the asking one names, if it has come here as such; None
        while they are not verified. Raises ProtocolError MALFORMED."""
        data, base = self.read(request.offset, request.nbytes), None
        if data is None:
            return None
        is_whole = request.nbytes == min(self._chunk_bytes, self._target.nbytes - request.offset)
        if request.base is not None and request.base == self.base_version and is_whole:
            difference = self._differences.get(request.offset)
            if difference is not None:
                data, base = memoryview(difference), request.base
        return Chunk(version=request.version, offset=request.offset, base=base, data=data)

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
            base=self.base_version if offset in self._as_difference else None,
        )

    def take(self, chunk: Chunk, sender: str) -> bool:
        """Put a chunk in its place; False for a late answer to an earlier request, or one that was sent twice."""
        offset, nbytes = chunk.offset, self._chunks.get(chunk.offset)
        if nbytes is None:
            return False
        if chunk.base is None:
            if nbytes != chunk.data.nbytes:
                return False
        elif offset not in self._as_difference or chunk.base != self.base_version:
            return False
        crash_point("weights.fetching")
        del self._chunks[offset]
        self._as_difference.discard(offset)
        self.received_bytes += chunk.data.nbytes
        if chunk.base is None:
            self._target[offset : offset + nbytes] = chunk.data
            self._put(offset, nbytes, sender)
            return True
        assert self._base is not None
        self._in_background(self._rebuild(self._base, chunk, nbytes, sender))
        return True

    async def _rebuild(self, base: Download, chunk: Chunk, nbytes: int, sender: str) -> None:
        """Make a chunk of its difference, in a thread. What is none comes again, plain."""
        place = slice(chunk.offset, chunk.offset + nbytes)
        try:
            await asyncio.to_thread(unpack, chunk.data, base._target[place], self._target[place], self._width)
        except Exception as problem:  # the plain bytes will do; a fault of our own is not the sender's
            refused = isinstance(problem, ProtocolError)
            self._refused.append((sender if refused else _OWN_BASE, str(problem)))
            self._chunks[chunk.offset] = nbytes
            return
        self.saved_bytes += nbytes - chunk.data.nbytes
        if self.keeps_differences:
            self._differences[chunk.offset] = bytes(chunk.data)
        self._put(chunk.offset, nbytes, sender)

    def _put(self, offset: int, nbytes: int, sender: str) -> None:
        """Note that bytes are in their place, and check the tensors that they complete."""
        complete = []
        for index in self._tensors_in(offset, nbytes):
            start, end = max(offset, self._starts[index]), min(offset + nbytes, self._ends[index])
            if not self._verified[index] and end > start:
                self._left[index] -= end - start
                self._senders[index].add(sender)
                if not self._left[index]:
                    complete.append(index)
        if complete:
            self._check(complete)

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
        self._in_background(self._verify(indices))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
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
                await self._suspect_base(index)
                self._wrong.append(index)
        if self.is_complete:
            self._base = None
        self.on_verified()

    async def _suspect_base(self, index: int) -> None:
        """Look whether a wrong tensor is the fault of the version before, and not of a sender."""
        entry, base = self.manifest.tensors[index], self._base
        for offset in [offset for offset in self._differences if index in self._tensors_in(offset, self._chunk_bytes)]:
            del self._differences[offset]
        if base is None:
            return
        piece = base._target[entry.offset : entry.offset + entry.nbytes]
        if await asyncio.to_thread(xxhash.xxh3_64_intdigest, piece) != base.manifest.tensors[index].xxh3:
            logger.error(
                "%r of version %s, verified when it came, has changed in this server's memory: look at its memory. "
                "Version %d comes without differences",
                *(entry.name, self.base_version, self.manifest.version),
            )
            self._senders[index].add(_OWN_BASE)
            self._base = None
            self._as_difference.clear()

    def ask_again(self, relay: str) -> None:
        """Let tensors with wrong checksums come again. Raises SourceFailed where `relay` has sent them alone, and
        ProtocolError MALFORMED at the learner's last try."""
        self._look_at_refused(relay)
        wrong, self._wrong = self._wrong, []
        guilty, last = [], []
        for index in wrong:
            entry, senders = self.manifest.tensors[index], self._senders[index]
            self._senders[index], self._left[index] = set(), entry.nbytes
            if not entry.nbytes:
                last.append(entry.name)  # nothing can come again: the manifest is wrong
            self._chunks |= self._cut(entry.offset, entry.nbytes)
            if relay and senders == {relay}:
                guilty.append(entry.name)
                continue
            if senders <= {""}:  # not where a part was another server's, who cannot be told from the one before it
                self._attempts[index] += 1
                if self._attempts[index] >= ATTEMPTS:
                    last.append(entry.name)
        if wrong:
            names = sorted(self.manifest.tensors[index].name for index in wrong)
            logger.warning("version %d: wrong checksum of %s, fetched again", self.manifest.version, names)
        if guilty:
            raise SourceFailed(
                "checksum", f"version {self.manifest.version} from {relay}: wrong checksum of {sorted(guilty)}"
            )
        if last:
            raise ProtocolError(
                ErrorCode.MALFORMED,
                f"version {self.manifest.version}: {len(last)} tensors have wrong checksums after {ATTEMPTS} "
                f"transfers, first {last[0]!r}. The link or the learner's memory corrupts data",
            )

    def _look_at_refused(self, relay: str) -> None:
        """Raises SourceFailed where the relay has sent what is no difference."""
        refused, self._refused = self._refused, []
        for sender, reason in refused:
            logger.warning(
                "version %d: a difference from %s is of no use, its bytes are fetched plain: %s",
                *(self.manifest.version, sender.strip() or "the learner", reason),
            )
        reasons = [reason for sender, reason in refused if relay and sender == relay]
        if reasons:
            raise SourceFailed("checksum", f"version {self.manifest.version} from {relay}: {reasons[0]}")

    def _cut(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Chunks of a range, each as offset and size."""
        end = offset + nbytes
        for start in range(offset, end, self._chunk_bytes):
            yield start, min(self._chunk_bytes, end - start)

    def _tensors_in(self, offset: int, nbytes: int) -> range:
        """Indices of the tensors with bytes in a range."""
        return range(bisect_right(self._ends, offset), bisect_left(self._starts, offset + nbytes))
