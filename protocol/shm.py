"""The reading side of weights in shared memory: check a manifest, map its file, verify checksums."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from protocol.errors import ErrorCode, ProtocolError
from protocol.layout import PublicationError, plan_layout
from protocol.messages import TensorEntry, WeightManifest
from protocol.weight_file import map_for_reading

PREFIX = "asyncrl-weights-"
"""Of every file of published weights."""
_THREADS = 4


class MappedWeights:
    """A version mapped from shared memory. Views stay valid until `close`, whatever the learner does."""

    def __init__(self, manifest: WeightManifest, view: memoryview):
        self.manifest = manifest
        self._view = view
        self.tensors: dict[str, memoryview] = {
            entry.name: view[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors
        }
        """Read-only bytes of each tensor."""

    def close(self) -> None:
        """Forget the views. The memory is returned once the caller has dropped its own."""
        self.tensors = {}
        self._view = memoryview(b"")

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def open_shm(manifest: WeightManifest, *, verify: bool = True) -> MappedWeights:
    """Map the file that `manifest` names; only for a server with the learner's `host_id`.

    Raises ProtocolError: VERSION_GONE if the file has gone or holds something else (take the next
    manifest, or pull over ZeroMQ), MALFORMED if the manifest contradicts itself; and PublicationError if
    the file may not be read.
    """
    check_manifest(manifest)
    path = Path(manifest.shm_path)
    if not path.name.startswith(PREFIX):
        raise ProtocolError(ErrorCode.MALFORMED, f"{manifest.shm_path!r} is not a file of published weights")
    try:
        view = map_for_reading(path, manifest.total_bytes)
    except FileNotFoundError as problem:
        raise ProtocolError(ErrorCode.VERSION_GONE, f"{path} (version {manifest.version}) has gone") from problem
    except ValueError as problem:
        reason = f"{path} is shorter than the {manifest.total_bytes} bytes of version {manifest.version}"
        raise ProtocolError(ErrorCode.VERSION_GONE, reason) from problem
    except OSError as problem:
        raise PublicationError(f"cannot map {path}: {problem}. Pull weights over zmq instead") from problem
    if view is None:
        reason = f"{path} (version {manifest.version}) is being filled with a later version"
        raise ProtocolError(ErrorCode.VERSION_GONE, reason)
    if verify:
        wrong = wrong_checksums(manifest.tensors, view)
        if wrong:
            reason = f"{path} is not version {manifest.version} any more: checksum of {wrong[0]!r} differs"
            raise ProtocolError(ErrorCode.VERSION_GONE, reason)
    return MappedWeights(manifest, view)


def check_manifest(manifest: WeightManifest) -> None:
    """Raises ProtocolError MALFORMED unless offsets, sizes and shapes are those of `plan_layout`."""
    try:
        layout = plan_layout((t.name, t.dtype, t.shape, t.nbytes) for t in manifest.tensors)
    except PublicationError as problem:
        raise ProtocolError(ErrorCode.MALFORMED, f"manifest of version {manifest.version}: {problem}") from problem
    agrees = layout.total_bytes == manifest.total_bytes and all(
        slot.offset == entry.offset for slot, entry in zip(layout.slots, manifest.tensors, strict=True)
    )
    if not agrees:
        raise ProtocolError(
            ErrorCode.MALFORMED,
            f"manifest of version {manifest.version}: offsets or total size ({manifest.total_bytes} bytes) "
            f"differ from the layout of its tensors ({layout.total_bytes} bytes)",
        )


def wrong_checksums(entries: Sequence[TensorEntry], view: memoryview) -> list[str]:
    """Names of the tensors whose bytes in `view` (a whole publication) do not have their checksum."""
    pieces = [view[entry.offset : entry.offset + entry.nbytes] for entry in entries]
    with Checksums(pieces) as checksums:
        return [entry.name for entry, found in zip(entries, checksums.result(), strict=True) if found != entry.xxh3]


class Checksums:
    """XXH3 (64 bits, seed 0) of each piece, computed by a few threads while the caller does something else.

    xxhash lets other threads run meanwhile, and memory gives several threads more than it gives one.
    """

    def __init__(self, pieces: Sequence[memoryview], threads: int = _THREADS):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="xxh3")
        self._futures: list[Future[int]] = [self._pool.submit(xxhash.xxh3_64_intdigest, piece) for piece in pieces]

    def result(self) -> list[int]:
        """One number for each piece, in their order."""
        return [future.result() for future in self._futures]

    def __enter__(self) -> Checksums:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
