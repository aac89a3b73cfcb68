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
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

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
THREADS = 2
"""Threads that copy, beside the one that computes checksums; the machine has other work."""
SMALLEST_SHARED = 1 << 20
"""Bytes from which several threads are faster than one."""
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


class FileLayout:
    """Places of tensors in a file, one after another."""

    def __init__(self) -> None:
        self.end = 0
        """Bytes of the file so far."""
        self._names: set[str] = set()

    def place(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Offset and bytes of the next tensor. Raises PublicationError for one that cannot be placed."""
        if name in self._names:
            raise PublicationError(f"tensor {name!r} is listed twice")
        self._names.add(name)
        if dtype not in ITEMSIZE:
            raise PublicationError(f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
        if any(n < 0 for n in shape):
            raise PublicationError(f"tensor {name!r} cannot have the shape {list(shape)}")
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = offset + nbytes
        return offset, nbytes


class WeightFile:
    """A writer's file in shared memory. Call order: `create` or `take_back`, `put` of each tensor, `finish`, `show`,
    ..., `remove`."""

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

    def take_back(self, path: Path) -> bool:
        """Reclaim the file for rewriting, under `path`'s partial name; False if it is missing or mapped."""
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
        return True

    def put(self, offset: int, pieces: Iterable[memoryview], pool: Executor) -> tuple[int, int]:
        """Put a tensor's bytes there, one piece after another. Returns the offset after them, and their checksum.

        A piece is read until the next one is asked for. Raises OSError, which may be ENOSPC for what is new.
        """
        digest = xxhash.xxh3_64()
        for piece in pieces:
            view = piece.cast("B") if piece.nbytes else memoryview(b"")
            share = -(-view.nbytes // THREADS)
            places = range(0, view.nbytes, share) if view.nbytes > SMALLEST_SHARED else ()
            copies = [pool.submit(self._put, offset + at, view[at : at + share]) for at in places]
            digest.update(view)  # meanwhile
            if not copies:
                self._put(offset, view)
            for copy in copies:
                copy.result()
            offset += view.nbytes
        return offset, digest.intdigest()

    def finish(self, nbytes: int) -> None:
        """End the file behind its last tensor."""
        if nbytes != self._nbytes:
            os.ftruncate(self._fd, nbytes)
            self.__dict__.pop("_array", None)
            self._nbytes = nbytes

    def _put(self, offset: int, view: memoryview) -> None:
        (self._copy if offset + view.nbytes <= self._nbytes else self._write)(offset, view)

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
    """Raise ProtocolError MALFORMED unless offsets, sizes and shapes are those of `FileLayout`."""
    layout = FileLayout()
    try:
        placed = [layout.place(t.name, t.dtype, t.shape) for t in manifest.tensors]
    except PublicationError as problem:
        raise ProtocolError(ErrorCode.MALFORMED, f"manifest of version {manifest.version}: {problem}") from problem
    given = [(t.offset, t.nbytes) for t in manifest.tensors]
    if given != placed or manifest.total_bytes != layout.end or not layout.end:
        raise ProtocolError(
            ErrorCode.MALFORMED,
            f"manifest of version {manifest.version}: offsets, sizes or the total of {manifest.total_bytes} bytes "
            f"differ from the layout of its tensors, of {layout.end} bytes",
        )


def wrong_checksums(entries: Sequence[TensorEntry], view: memoryview) -> list[str]:
    """Names of the tensors whose bytes in `view` (a whole publication) do not have their checksum."""
    pieces = [view[entry.offset : entry.offset + entry.nbytes] for entry in entries]
    # xxhash lets other threads run meanwhile, and memory gives several threads more than it gives one.
    with ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="xxh3") as pool:
        checksums = pool.map(xxhash.xxh3_64_intdigest, pieces)
        return [entry.name for entry, checksum in zip(entries, checksums, strict=True) if checksum != entry.xxh3]
