"""The reading side of weights in shared memory: check a manifest, map its file, verify checksums."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weight_file import PREFIX, PublicationError, map_for_reading, plan_layout

_THREADS = 4


def open_shm(manifest: WeightManifest) -> dict[str, memoryview]:
    """Map the file that `manifest` names, and return read-only bytes of each tensor by its name.

    Only for a server with the learner's `host_id`. The mapping lives until its last view goes, whatever the learner
    does. Raises ProtocolError: VERSION_GONE if the file has gone or holds something else (take the next manifest, or
    pull over ZeroMQ), MALFORMED if the manifest contradicts itself; and PublicationError if the file may not be read.
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
    wrong = wrong_checksums(manifest.tensors, view)
    if wrong:
        reason = f"{path} is not version {manifest.version} any more: checksum of {wrong[0]!r} differs"
        raise ProtocolError(ErrorCode.VERSION_GONE, reason)
    return {entry.name: view[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors}


def check_manifest(manifest: WeightManifest) -> None:
    """Raise ProtocolError MALFORMED unless offsets, sizes and shapes are those of `plan_layout`."""
    try:
        offsets, total_bytes = plan_layout((t.name, t.dtype, t.shape, t.nbytes) for t in manifest.tensors)
    except PublicationError as problem:
        raise ProtocolError(ErrorCode.MALFORMED, f"manifest of version {manifest.version}: {problem}") from problem
    if total_bytes != manifest.total_bytes or offsets != [entry.offset for entry in manifest.tensors]:
        raise ProtocolError(
            ErrorCode.MALFORMED,
            f"manifest of version {manifest.version}: offsets or total size ({manifest.total_bytes} bytes) "
            f"differ from the layout of its tensors ({total_bytes} bytes)",
        )


def wrong_checksums(entries: Sequence[TensorEntry], view: memoryview) -> list[str]:
    """Names of the tensors whose bytes in `view` (a whole publication) do not have their checksum."""
    pieces = [view[entry.offset : entry.offset + entry.nbytes] for entry in entries]
    # xxhash lets other threads run meanwhile, and memory gives several threads more than it gives one.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="xxh3") as pool:
        checksums = pool.map(xxhash.xxh3_64_intdigest, pieces)
        return [entry.name for entry, checksum in zip(entries, checksums, strict=True) if checksum != entry.xxh3]
