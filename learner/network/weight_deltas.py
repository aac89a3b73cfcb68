"""Differences of published versions for servers that still have another one (network.weights_compression=delta).

A chunk's difference is computed when a server first asks for it, in threads, and kept for all others while both
versions are published. Requests wait for it on the network thread, which does none of the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from protocol.download import CHUNK_BYTES
from protocol.errors import ProtocolError
from protocol.messages import Chunk, ChunkRequest
from protocol.weight_deltas import element_bytes, pack
from protocol.weight_file import THREADS
from protocol.weights import Publication

logger = logging.getLogger(__name__)

MOST_PAIRS = 2
"""Pairs of versions whose differences are kept: each costs at most half a version."""
MOST_WAITING = 1024
"""Requests that wait for a difference; more are answered with the plain bytes."""


@dataclass
class _Pair:
    """Differences of one version from another one, by their offset."""

    width: int
    """Bytes of an element; 0: the versions have no difference."""
    packed: dict[int, bytes | None] = field(default_factory=dict)
    """None: the plain bytes are as good."""
    waiting: dict[int, dict[bytes, ChunkRequest]] = field(default_factory=dict)
    """Requests for a difference that is being computed, by offset and connection."""


class WeightDeltas:
    """Used by the network thread."""

    def __init__(
        self,
        publication: Publication,
        post: Callable[[Callable[[], None]], None],
        answer: Callable[[bytes, ChunkRequest], None],
    ):
        """`post` calls on the network thread, from any other; `answer` handles a request once more."""
        self._publication = publication
        self._post, self._answer = post, answer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weight-deltas")
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def instead_of(self, plain: Chunk, identity: bytes, request: ChunkRequest) -> Chunk | None:
        """The difference where the request names a version that is still published, and else `plain`.

        None while it is computed: `answer` gets the request again.
        """
        base, offset = request.base, request.offset
        if base is None or base == request.version or offset % CHUNK_BYTES:
            return plain
        try:
            pair = self._pair(request.version, base)
            total = self._publication.manifest(request.version).total_bytes
            # Only what every server asks for: differences of any other ranges would be kept in vain.
            if not pair.width or request.nbytes != min(CHUNK_BYTES, total - offset):
                return plain
            old = self._publication.read(base, offset, request.nbytes)
        except ProtocolError:  # the server's version is published no more
            return plain
        if offset in pair.packed:
            packed = pair.packed[offset]
            if packed is None:
                return plain
            return Chunk(version=request.version, offset=offset, base=base, data=memoryview(packed))
        if sum(len(requests) for requests in pair.waiting.values()) >= MOST_WAITING:
            return plain
        is_new = offset not in pair.waiting
        pair.waiting.setdefault(offset, {})[identity] = request
        if is_new:
            self._pool.submit(self._compute, pair, offset, old, plain.data)
        return None

    def _pair(self, version: int, base: int) -> _Pair:
        """Raises ProtocolError where either is not published."""
        key = (version, base)
        if key not in self._pairs:
            manifests = self._publication.manifest(base), self._publication.manifest(version)
            published = self._publication.versions
            kept = [(other, pair) for other, pair in self._pairs.items() if set(other) <= set(published)]
            self._pairs = dict(kept[len(kept) - (MOST_PAIRS - 1) :] if len(kept) >= MOST_PAIRS else kept)
            self._pairs[key] = _Pair(element_bytes(*manifests))
        return self._pairs[key]

    def _compute(self, pair: _Pair, offset: int, old: memoryview, new: memoryview) -> None:
        """Compute the difference in a thread of the pool. The views keep both versions' files from being filled
        again."""
        packed = None
        try:
            packed = pack(old, new, pair.width)
        except Exception:  # servers get plain bytes, and wait for nothing
            logger.exception("no difference of a version's bytes from %d on", offset)
        self._post(partial(self._finish, pair, offset, packed))

    def _finish(self, pair: _Pair, offset: int, packed: bytes | None) -> None:
        pair.packed[offset] = packed
        for identity, request in pair.waiting.pop(offset).items():
            self._answer(identity, request)

    def close(self) -> None:
        """Wait for what is being computed; nothing is posted afterwards."""
        self._pool.shutdown(wait=True, cancel_futures=True)
