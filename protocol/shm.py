"""The reading side of weights in shared memory: check a manifest, map its file, verify checksums."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.errors import ErrorCode, ProtocolError
from protocol.layout import PublicationError, plan_layout
from protocol.messages import TensorEntry, WeightManifest

PREFIX = "asyncrl-weights-"
"""Of every file of published weights."""
_CHECKSUM_THREADS = 4


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
        view = map_file(path, manifest.total_bytes)
    except FileNotFoundError as problem:
        raise ProtocolError(ErrorCode.VERSION_GONE, f"{path} (version {manifest.version}) has gone") from problem
    except ValueError as problem:
        reason = f"{path} is shorter than the {manifest.total_bytes} bytes of version {manifest.version}"
        raise ProtocolError(ErrorCode.VERSION_GONE, reason) from problem
    except OSError as problem:
        raise PublicationError(f"cannot map {path}: {problem}. Pull weights over zmq instead") from problem
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
    """Names of the tensors whose bytes in `view` (a whole publication) do not have their CRC-32."""
    pieces = [view[entry.offset : entry.offset + entry.nbytes] for entry in entries]
    found = checksums(pieces)
    return [entry.name for entry, crc in zip(entries, found, strict=True) if crc != entry.crc32]


def checksums(pieces: Sequence[memoryview]) -> list[int]:
    """CRC-32 of each piece, a few at a time: zlib lets other threads run meanwhile."""
    with ThreadPoolExecutor(_CHECKSUM_THREADS, thread_name_prefix="crc32") as pool:
        return list(pool.map(zlib.crc32, pieces))


def map_file(path: Path, total_bytes: int) -> memoryview:
    """A read-only mapping. Raises OSError, or ValueError if the file is shorter."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return memoryview(mmap.mmap(fd, total_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
