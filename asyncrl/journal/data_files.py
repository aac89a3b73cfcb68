"""The groups' bytes: append-only files beside the journal, whose rows say where each group lies.

    journal.sqlite.groups-000001    groups, one after the other, with nothing between them

Bytes are written, and with durability `power` on the disk, before the transaction that names them commits. What no row
names is nothing: the rest of a transaction that failed or of a process that died is cut off, and a file is deleted
when all its groups are forgotten. A process never appends to the files of an earlier one.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
import zmq

from asyncrl.errors import BadStateError
from protocol.codec import Frame, Limits, decode
from protocol.errors import ProtocolError
from protocol.messages import Group

DATA_FILE_BYTES = 64 << 20
"""A new file is begun after so much. A file lives as long as its longest remembered group."""
PLACE = "data_file, offset, length, checksum"
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
    """Return the first WORD bytes of a frame that only repeats them, and any other frame whole."""
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
    """Data file, offset, length and 64-bit XXH3 checksum of a group: what the journal's row holds."""

    data_file: int
    offset: int
    length: int
    checksum: bytes


def data_file_path(journal: Path, number: int) -> Path:
    return journal.with_name(f"{journal.name}.groups-{number:06d}")


def data_file_paths(journal: Path) -> dict[int, Path]:
    """Number -> file, of every data file beside the journal."""
    files = sorted(journal.parent.glob(f"{journal.name}.groups-*"))
    return {int(number): path for path in files if (number := path.name.rpartition("-")[2]).isdecimal()}


def read_place(fd: int, place: Place) -> bytes | None:
    """A group's bytes; None where they are not those that were written."""
    payload = os.pread(fd, place.length, place.offset)
    return payload if xxhash.xxh3_64_digest(payload) == place.checksum else None


class DataFiles:
    """Writes all data files of a journal. For one thread at a time; only `sync` may run beside the others."""

    def __init__(self, journal: Path, places: Iterable[Place]):
        """`places`: locations of all groups in the journal."""
        self._journal = journal
        self._current = 0
        """Number of the data file that is written to."""
        self._file: io.FileIO | None = None
        """The current data file."""
        self._ends: dict[int, int] = {}
        """End of the last committed group of each file."""
        self._groups: Counter[int] = Counter()
        """Number of remembered groups of each file."""
        self._unsynced: set[int] = set()
        self._new_names = False
        self._syncing = threading.Lock()  # a `sync` with nothing to do must not return before one that is under way
        self.obsolete: list[Path] = []
        """Files without groups. They may be deleted when the transaction that forgot the last one is on the disk."""
        self.live_bytes = 0
        self._remember(places)
        files = data_file_paths(journal)
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
        if self._file is None or self._ends[self._current] >= DATA_FILE_BYTES:
            self._file = self._begin()
        offset = self._ends[self._current]
        places: list[Place] = []
        with open(self._file.fileno(), "wb", closefd=False) as file:
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

    def _begin(self) -> io.FileIO:
        file = data_file_path(self._journal, self._last + 1).open("xb", buffering=0)
        before = self._current if self._file is not None else None
        self.close()
        self._new_names = True
        self._current = self._last = self._last + 1
        self._ends[self._current] = 0
        if before is not None and not self._groups[before]:
            self._discard(before)
        return file

    def settle(self, added: Sequence[Place], forgotten: Sequence[Place]) -> bool:
        """Record a committed transaction's added and removed groups; return True if a file became obsolete."""
        self._remember(added)
        for place in forgotten:
            self._groups[place.data_file] -= 1
            self.live_bytes -= place.length
        emptied = [number for number in {place.data_file for place in forgotten} if not self._groups[number]]
        for number in emptied:
            self._discard(number)
        return bool(emptied)

    def _remember(self, places: Iterable[Place]) -> None:
        for place in places:
            self._groups[place.data_file] += 1
            self._ends[place.data_file] = max(self._ends.get(place.data_file, 0), place.offset + place.length)
            self.live_bytes += place.length

    def cut(self) -> None:
        """Truncate uncommitted bytes after a failed transaction."""
        if self._file is not None:
            self._file.truncate(self._ends[self._current])

    def _discard(self, number: int) -> None:
        if number == self._current:
            self.close()
        del self._ends[number], self._groups[number]
        self._unsynced.discard(number)
        self.obsolete.append(data_file_path(self._journal, number))

    def sync(self) -> None:
        """Bring to the disk what was appended before. Raises OSError."""
        with self._syncing:
            for number in sorted(self._unsynced):
                self._unsynced.discard(number)  # before the syncing: what is appended meanwhile is noted again
                with suppress(FileNotFoundError):  # discarded since
                    _sync(data_file_path(self._journal, number), os.fdatasync)
            if self._new_names:
                self._new_names = False
                _sync(self._journal.parent, os.fsync)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _sync(path: Path, sync: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
