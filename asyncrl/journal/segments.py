"""The groups' bytes: append-only files beside the journal, whose rows say where each group lies.

    journal.sqlite.groups-000001    groups, one after the other, with nothing between them

Bytes are written, and with durability `power` on the disk, before the transaction that names them commits. What no row
names is nothing: the rest of a transaction that failed or of a process that died is cut off, and a file is deleted
when all its groups are forgotten. A process never appends to the files of an earlier one.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
import zmq

from asyncrl.errors import BadStateError
from protocol.codec import Frame, Limits, decode
from protocol.errors import ProtocolError
from protocol.messages import Group

SEGMENT_BYTES = 64 << 20
"""A new file is begun after so much. A file lives as long as its longest remembered group."""
PLACE = "segment, offset, length, checksum"
"""The columns of a Place."""
WORD = 4
"""Bytes of one int32 or float32."""
SHORT = 256
"""Largest size in bytes of a frame that is always kept as it is."""


# --- one group as bytes -----------------------------------------------------------------------------


def pack_frames(frames: Sequence[Frame]) -> list[bytes | memoryview]:
    """A group in pieces: the number of frames, their sizes in the journal and in full, their bytes.

    A column that repeats one value (the versions between two updates, a mask without tools) is kept as that value.
    """
    full = [frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame) for frame in frames]
    kept = [full[0], *(_without_repetition(frame) for frame in full[1:])]
    sizes = [size for pair in zip(kept, full, strict=True) for size in (pair[0].nbytes, pair[1].nbytes)]
    return [struct.pack(f"<I{len(sizes)}Q", len(full), *sizes), *kept]


def _without_repetition(frame: memoryview) -> memoryview:
    """The first WORD bytes of a frame that is nothing but their repetition."""
    if frame.nbytes < SHORT or frame.nbytes % WORD or frame[:WORD] != frame[-WORD:]:
        return frame
    words = np.frombuffer(frame, np.uint32)
    return frame[:WORD] if words.min() == words.max() else frame


def unpack_group(payload: bytes) -> Group:
    """The group of `pack_frames`. Arrays are views of `payload`, but for the repetitive ones."""
    view = memoryview(payload)
    (count,) = struct.unpack_from("<I", view)
    sizes = struct.unpack_from(f"<{2 * count}Q", view, 4)
    start = 4 + 16 * count
    frames: list[memoryview] = []
    for kept, full in zip(sizes[::2], sizes[1::2], strict=True):
        frame = view[start : start + kept]
        frames.append(frame if kept == full else memoryview(bytes(frame) * (full // WORD)))
        start += kept
    try:
        group = decode(frames, (Group,), Limits(max_message_bytes=sum(sizes[1::2])))
    except ProtocolError as problem:
        raise BadStateError(f"a group in the journal cannot be read by this version of asyncrl: {problem}") from problem
    assert isinstance(group, Group)
    return group


# --- many groups in files ---------------------------------------------------------------------------


class Place(NamedTuple):
    """The position of a group, and the XXH3 of its bytes (64 bits): what the journal's row holds."""

    segment: int
    offset: int
    length: int
    checksum: bytes


def segment_path(journal: Path, number: int) -> Path:
    return journal.with_name(f"{journal.name}.groups-{number:06d}")


def segment_files(journal: Path) -> dict[int, Path]:
    """Number -> file, of every segment beside the journal."""
    files = sorted(journal.parent.glob(f"{journal.name}.groups-*"))
    return {int(number): path for path in files if (number := path.name.rpartition("-")[2]).isdecimal()}


def read_place(fd: int, place: Place) -> bytes | None:
    """A group's bytes; None where they are not those that were written."""
    payload = os.pread(fd, place.length, place.offset)
    return payload if xxhash.xxh3_64_digest(payload) == place.checksum else None


class Segments:
    """All segments of a journal. For one thread at a time, like the journal; only `sync` may run beside the others.

    `journal` None keeps them in memory.
    """

    def __init__(self, journal: Path | None, places: Iterable[Place] = ()):
        """`places`: of all groups that the journal names."""
        self._journal = journal
        self._fds: dict[int, int] = {}
        """Descriptor of the current file; in memory, of all. Others are opened on demand: there may be thousands."""
        self._ends: dict[int, int] = {}
        """End of the last committed group of each file."""
        self._groups: Counter[int] = Counter()
        """Number of remembered groups of each file."""
        self._current: int | None = None
        self._unsynced: set[int] = set()
        self._new_names = False
        self._syncing = threading.Lock()  # a `sync` with nothing to do must not return before one that is under way
        self._guard = threading.Lock()  # of descriptors, between `sync` and closing
        self.obsolete: list[Path] = []
        """Files without groups. They may be deleted when the transaction that forgot the last one is on the disk."""
        self.live_bytes = 0
        self._remember(places)
        files = segment_files(journal) if journal is not None else {}
        self._last = max([0, *self._groups, *files])
        for number, path in files.items():  # of an earlier process
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
        """Write groups in pieces; they count once `settle` is called with their places. Raises OSError."""
        if self._current is None or self._ends[self._current] >= SEGMENT_BYTES:
            self._begin()
        assert self._current is not None
        offset = self._ends[self._current]
        places: list[Place] = []
        with open(self._fds[self._current], "wb", closefd=False) as file:
            file.seek(offset)
            for pieces in groups:
                hashed = xxhash.xxh3_64()
                for piece in pieces:
                    hashed.update(piece)
                file.writelines(pieces)
                length = sum(map(len, pieces))
                places.append(Place(self._current, offset, length, hashed.digest()))
                offset += length
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
            self._close(before)

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
            self._ends[place.segment] = max(self._ends.get(place.segment, 0), place.offset + place.length)
            self.live_bytes += place.length

    def cut(self) -> None:
        """Remove what was appended last: the transaction that would have named it has failed."""
        if self._current is not None:
            os.ftruncate(self._fds[self._current], self._ends[self._current])

    def _discard(self, number: int) -> None:
        if number == self._current:
            self._current = None
        del self._ends[number], self._groups[number]
        self._unsynced.discard(number)
        self._close(number)
        if self._journal is not None:
            self.obsolete.append(segment_path(self._journal, number))

    def _close(self, number: int) -> None:
        with self._guard:
            if number in self._fds:
                os.close(self._fds.pop(number))

    def sync(self) -> None:
        """Bring to the disk what was appended before. Raises OSError."""
        with self._syncing:
            for number in sorted(self._unsynced):
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
                folder = os.open(self._journal.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    def read(self, place: Place) -> bytes | None:
        """A group's bytes; None where they are not those that were written."""
        fd = self._open(place.segment)
        if fd is None:
            return None
        try:
            return read_place(fd, place)
        finally:
            os.close(fd)

    def _open(self, number: int) -> int | None:
        """A descriptor of the caller's own; None where the file does not exist."""
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
