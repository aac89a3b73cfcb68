"""The file of one published version: tensors at aligned offsets, written by the learner and mapped by servers.

A file is filled again once it is not read any more: filling memory that is there already takes a third of the time of
new memory, which the kernel has to find and to zero. Safety is the kernel's: a reader holds a shared lock (flock) for
as long as it has the file mapped, and drops it even when it is killed; the writer fills only files that it has locked
exclusively. A file has another name meanwhile.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import TensorEntry, WeightManifest

PREFIX = "asyncrl-weights-"
"""Prefix of the names of files with published weights."""
PARTIAL = ".partial"
"""Suffix of the name of a file that is being filled."""
_WRITE_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
THREADS = 2
"""Threads that copy, and as many that compute checksums; the machine has other work."""
_READING_THREADS = 4
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux only; elsewhere pages come one by one
ALIGNMENT = 64
"""Alignment in bytes: a cache line, and more than any dtype needs."""

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch dtype name without the prefix."""


class PublicationError(Exception):
    """Weights that cannot be published or mapped; the message is for the user."""


def plan_layout(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[list[int], int]:
    """Offsets of tensors `(name, dtype, shape, nbytes)` placed one after another, and the end of the last one.

    Raises PublicationError for a tensor that cannot be placed.
    """
    offsets: list[int] = []
    names: set[str] = set()
    end = 0
    for name, dtype, shape, nbytes in tensors:
        if name in names:
            raise PublicationError(f"tensor {name!r} is listed twice")
        names.add(name)
        if dtype not in ITEMSIZE:
            raise PublicationError(f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
        if any(n < 0 for n in shape) or math.prod(shape) * ITEMSIZE[dtype] != nbytes:
            raise PublicationError(f"tensor {name!r}: {dtype}{list(shape)} does not have {nbytes} bytes")
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + nbytes
    if end == 0:
        raise PublicationError("there is nothing to publish: no tensor has any element")
    return offsets, end


@contextmanager
def threads(data: Sequence[memoryview], name: str) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map` on THREADS threads for as much data as pays for them, else the ordinary one."""
    if sum(view.nbytes for view in data) <= _PIECE_BYTES:
        yield map
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix=name) as pool:
        yield pool.map


class WeightFile:
    """A writer's file in shared memory. Call order: (`create` or `take_back`), `fill`, `show`, ..., `remove`."""

    def __init__(self, path: Path, fd: int):
        self.path = path
        self._fd = fd
        self._nbytes = 0

    @classmethod
    def create(cls, path: Path) -> WeightFile:
        """A new, empty file under a partial name, locked. Raises OSError."""
        partial = path.with_name(path.name + PARTIAL)
        file = cls(partial, os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        fcntl.flock(file._fd, fcntl.LOCK_EX)
        return file

    def take_back(self, path: Path, nbytes: int) -> bool:
        """Reclaim the file for rewriting, under `path`'s partial name; False if missing, of another size or mapped."""
        partial = path.with_name(path.name + PARTIAL)
        try:
            self.path.rename(partial)  # first: from now on readers find nothing under the old name
        except FileNotFoundError:
            return False
        self.path = partial
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return nbytes == self._nbytes

    def fill(self, offsets: Sequence[int], data: Sequence[memoryview]) -> None:
        """Put each tensor's bytes at its offset. Raises OSError, which may be ENOSPC for a new file."""
        put = self._write if self._nbytes == 0 else self._copy
        with threads(data, "weights") as apply:
            for _ in apply(put, *zip(*_pieces(offsets, data), strict=True)):
                pass
        if self._nbytes == 0:
            self._nbytes = offsets[-1] + data[-1].nbytes
            os.ftruncate(self._fd, self._nbytes)

    def _write(self, offset: int, view: memoryview) -> None:
        """Write into a new file. A write without room fails, where a mapping would kill the process."""
        while view.nbytes:
            crash_point("weights.filling")
            written = os.pwrite(self._fd, view[:_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written

    def _copy(self, offset: int, view: memoryview) -> None:
        """Copy into the mapped file. numpy lets other threads run meanwhile: sockets, and checksums."""
        crash_point("weights.filling")
        np.copyto(self._array[offset : offset + view.nbytes], np.frombuffer(view, np.uint8))

    @cached_property
    def _array(self) -> np.ndarray:
        """The file's [N] bytes, mapped in one go when it is first filled again."""
        return np.frombuffer(mmap.mmap(self._fd, self._nbytes, flags=mmap.MAP_SHARED | _POPULATE), np.uint8)

    def show(self, path: Path) -> None:
        """Publish the complete file under its final name, and let readers lock it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.path.rename(path)
        self.path = path

    def remove(self) -> None:
        """Delete the file. Readers that have it mapped may go on."""
        self.path.unlink(missing_ok=True)
        self.__dict__.pop("_array", None)
        with suppress(OSError):
            os.close(self._fd)
        self._fd = -1


def map_for_reading(path: Path, total_bytes: int) -> memoryview:
    """Map the file read-only. Its bytes do not change before the last view goes.

    Python's mapping keeps a duplicate of the descriptor, and with it the lock, as long as it lives.
    Raises FileNotFoundError, also if the file has been taken back, OSError, or ValueError if the file is shorter.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise FileNotFoundError(f"{path} is being filled with a later version") from problem
        # Between opening and locking it may have been taken back, filled, and shown under another name.
        if not os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            raise FileNotFoundError(f"{path} is another file by now")
        return memoryview(mmap.mmap(fd, total_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _pieces(offsets: Sequence[int], data: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Cut tensors into (offset in the file, bytes) small enough that threads share the work evenly."""
    for offset, view in zip(offsets, data, strict=True):
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield offset + start, view[start : start + _PIECE_BYTES]


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
    with ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="xxh3") as pool:
        checksums = pool.map(xxhash.xxh3_64_intdigest, pieces)
        return [entry.name for entry, checksum in zip(entries, checksums, strict=True) if checksum != entry.xxh3]
