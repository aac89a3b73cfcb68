"""A file of published weights, filled again with a later version once nobody reads the earlier one.

Filling memory that is there already takes a third of the time of new memory, which the kernel has to find and to
zero. Safety is the kernel's: a reader holds a shared lock (flock) for as long as it has the file mapped, and drops it
even when it is killed; the writer fills only what it has locked alone. While it is filled a file has another name.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from protocol.faults import crash_point
from protocol.layout import Layout

PARTIAL = ".partial"
"""Ends the name of a file that is being filled."""
_WRITE_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
THREADS = 2
"""That copy, and as many that compute checksums; the machine has other work."""


class WeightFile:
    """One file in shared memory. Its owner calls: (`create` or `take_back`), `fill`, `show`, ..., `remove`."""

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
        """Hide the file under the partial name of `path`; False if it has gone, has another size, or is still read."""
        partial = path.with_name(path.name + PARTIAL)
        try:
            self.path.rename(partial)  # first: whoever looks for the old name from now on finds nothing
        except FileNotFoundError:
            return False
        self.path = partial
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return nbytes == self._nbytes

    def fill(self, layout: Layout, data: Sequence[memoryview]) -> None:
        """Put the bytes of every slot in place. Raises OSError, which may be ENOSPC for a new file."""
        put = self._write if self._nbytes == 0 else self._copy
        with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
            for _ in pool.map(put, *zip(*_pieces(layout, data), strict=True)):
                pass
        if self._nbytes == 0:
            os.ftruncate(self._fd, layout.total_bytes)
            self._nbytes = layout.total_bytes

    def _write(self, offset: int, view: memoryview) -> None:
        """Into a new file. Not through a mapping: without room a write fails, where a mapping kills the process."""
        while view.nbytes:
            crash_point("weights.filling")
            written = os.pwrite(self._fd, view[:_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written

    def _copy(self, offset: int, view: memoryview) -> None:
        """numpy lets other threads run meanwhile: the learner's sockets, and checksums of the same bytes."""
        crash_point("weights.filling")
        np.copyto(self._array[offset : offset + view.nbytes], np.frombuffer(view, np.uint8))

    @cached_property
    def _array(self) -> np.ndarray:
        """[N] bytes of the file, mapped in one go when it is first filled again."""
        return np.frombuffer(mmap.mmap(self._fd, self._nbytes, flags=mmap.MAP_SHARED | _POPULATE), np.uint8)

    def show(self, path: Path) -> None:
        """The content is complete: let readers lock it, and give it its name."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.path.rename(path)
        self.path = path

    def remove(self) -> None:
        """Readers that have it mapped may go on."""
        self.path.unlink(missing_ok=True)
        self.__dict__.pop("_array", None)
        with suppress(OSError):
            os.close(self._fd)
        self._fd = -1


_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux only; elsewhere pages come one by one


def map_for_reading(path: Path, total_bytes: int) -> memoryview | None:
    """A read-only mapping whose bytes do not change before its last view goes; None if the file has been taken back.

    Python's mapping keeps a duplicate of the descriptor, and with it the lock, as long as it lives.
    Raises OSError, or ValueError if the file is shorter.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # Between opening and locking it may have been taken back, filled, and shown under another name.
        if not os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            return None
        return memoryview(mmap.mmap(fd, total_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _pieces(layout: Layout, data: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Offset in the file and bytes, small enough that threads share the work whatever the tensors' sizes."""
    for slot, view in zip(layout.slots, data, strict=True):
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield slot.offset + start, view[start : start + _PIECE_BYTES]
