"""The groups' bytes: append-only files beside the journal, whose rows say where each group lies.

    journal.sqlite.groups-000001    groups, one after the other, with nothing between them

Bytes are written, and with durability `power` on the disk, before the transaction that names them commits. What no row
names is nothing: the rest of a transaction that failed or of a process that died is cut off, and a file is deleted
when all its groups are forgotten. A process never appends to the files of an earlier one.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

SEGMENT_BYTES = 64 << 20
"""A new file is begun after so much. A file lives as long as its longest remembered group."""
PLACE = "segment, offset, length, checksum"
"""The columns of a Place."""
_MOST_PIECES = 512
"""Of one system call; the kernel takes 1,024."""


class Place(NamedTuple):
    """Where a group lies, and the XXH3 of its bytes (64 bits): what the journal's row holds."""

    segment: int
    offset: int
    length: int
    checksum: bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


class Segments:
    """Like the journal for one thread at a time; only `sync` may run beside the others. `journal` None: in memory."""

    def __init__(self, journal: Path | None, places: Iterable[Place] = ()):
        """`places`: of all groups that the journal names."""
        self._journal = journal
        self._fds: dict[int, int] = {}
        """Of the current file; in memory, of all. Others are opened when they are asked for: there may be thousands."""
        self._ends: dict[int, int] = {}
        """Where the last group of each file ends that has been committed."""
        self._groups: Counter[int] = Counter()
        """That are remembered, by file."""
        self._current: int | None = None
        self._unsynced: set[int] = set()
        self._new_names = False
        self._syncing = threading.Lock()  # who finds nothing to sync must not return before who syncs it
        self._guard = threading.Lock()  # of descriptors, between `sync` and closing
        self.obsolete: list[Path] = []
        """Files without groups. They may be deleted when the transaction that forgot the last one is on the disk."""
        self.live_bytes = 0
        self._remember(places)
        self._last = max(self._groups, default=0)
        self._adopt()

    def _adopt(self) -> None:
        """The files of an earlier process: those with groups end with the last one, the others are obsolete."""
        found = segment_files(self._journal) if self._journal is not None else {}
        self._last = max([self._last, *found])
        for number, path in found.items():
            if not self._groups[number]:
                self.obsolete.append(path)
                continue
            os.truncate(path, self._ends[number])
            self._unsynced.add(number)
            self._new_names = True

    @property
    def file_bytes(self) -> int:
        return sum(list(self._ends.values()))

    def append(self, groups: Sequence[Sequence[bytes | memoryview]]) -> list[Place]:
        """Groups in pieces, all written on return, and for nobody there before `settle`. Raises OSError."""
        if self._current is None or self._ends[self._current] >= SEGMENT_BYTES:
            self._begin()
        assert self._current is not None
        offset = start = self._ends[self._current]
        places: list[Place] = []
        for pieces in groups:
            hashed = xxhash.xxh3_64()
            length = 0
            for piece in pieces:
                hashed.update(piece)
                length += len(piece)
            places.append(Place(self._current, offset, length, hashed.digest()))
            offset += length
        _write(self._fds[self._current], [memoryview(piece) for pieces in groups for piece in pieces], start)
        self._unsynced.add(self._current)  # after the writing, see `sync`
        return places

    def _begin(self) -> None:
        self._last += 1
        if self._journal is None:
            fd = os.memfd_create("groups")
        else:
            path = segment_path(self._journal, self._last)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._new_names = True
        before, self._current = self._current, self._last
        self._fds[self._current], self._ends[self._current] = fd, 0
        if before is not None and not self._groups[before]:
            self._discard(before)
        elif before is not None and self._journal is not None:
            with self._guard:
                os.close(self._fds.pop(before))

    def settle(self, added: Sequence[Place], forgotten: Sequence[Place]) -> None:
        """The transaction that named and forgot these is committed."""
        self._remember(added)
        for place in forgotten:
            self._groups[place.segment] -= 1
            self.live_bytes -= place.length
        for number in {place.segment for place in forgotten}:
            if not self._groups[number]:
                self._discard(number)

    def _remember(self, places: Iterable[Place]) -> None:
        for place in places:
            self._groups[place.segment] += 1
            self._ends[place.segment] = max(self._ends.get(place.segment, 0), place.end)
            self.live_bytes += place.length

    def cut(self) -> None:
        """The transaction that would have named what was appended last has failed."""
        if self._current is not None:
            os.ftruncate(self._fds[self._current], self._ends[self._current])

    def _discard(self, number: int) -> None:
        if number == self._current:
            self._current = None
        del self._ends[number], self._groups[number]
        with self._guard:
            self._unsynced.discard(number)
            if number in self._fds:
                os.close(self._fds.pop(number))
        if self._journal is not None:
            self.obsolete.append(segment_path(self._journal, number))

    def sync(self) -> None:
        """What was appended before is on the disk on return. Raises OSError."""
        with self._syncing:
            unsynced = sorted(self._unsynced)
            for number in unsynced:
                fd = self._open(number)
                if fd is None:  # discarded since
                    continue
                try:
                    self._unsynced.discard(number)  # before the syncing: what is appended meanwhile is noted again
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            if self._new_names and self._journal is not None:
                self._new_names = False
                _sync_folder(self._journal.parent)

    def read(self, place: Place) -> bytes | None:
        """None where the bytes are not those that were written."""
        fd = self._open(place.segment)
        if fd is None:
            return None
        try:
            return read_place(fd, place)
        finally:
            os.close(fd)

    def _open(self, number: int) -> int | None:
        """A descriptor of the caller's own; None where the file is not there."""
        with self._guard:
            if number in self._fds:
                return os.dup(self._fds[number])
        if self._journal is None:
            return None
        try:
            return os.open(segment_path(self._journal, number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def segment_path(journal: Path, number: int) -> Path:
    return journal.with_name(f"{journal.name}.groups-{number:06d}")


def segment_files(journal: Path) -> dict[int, Path]:
    """By number."""
    found = sorted(journal.parent.glob(f"{journal.name}.groups-*"))
    return {int(number): path for path in found if (number := path.name.rpartition("-")[2]).isdecimal()}


def read_place(fd: int, place: Place) -> bytes | None:
    """None where the bytes are not those that were written."""
    payload = os.pread(fd, place.length, place.offset)
    return payload if xxhash.xxh3_64_digest(payload) == place.checksum else None


def _write(fd: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        written = os.pwritev(fd, pieces[:_MOST_PIECES], offset)
        offset += written
        whole = 0
        while whole < len(pieces) and written >= pieces[whole].nbytes:
            written -= pieces[whole].nbytes
            whole += 1
        del pieces[:whole]
        if written:
            pieces[0] = pieces[0][written:]


def _sync_folder(folder: Path) -> None:
    """The names of new files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
