"""JSON lines in files that grow: append, follow, and cut back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def write_atomically(path: Path, data: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file: readers see the old content or the new. `durable` survives a power cut too, and costs a sync.
    `mode` are its rights, less the umask."""
    # The process id keeps two writers from sharing one temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def drop_unfinished_line(path: Path) -> None:
    """Cut off a last line without its newline: what a crash leaves in the middle of a write."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            logger.warning("%s ended in the middle of a line; dropped its %d bytes", path, len(content) - end)
            file.truncate(end)


def keep_steps(path: Path, last_step: int) -> int:
    """Keep only the lines whose `step` is at most `last_step`; returns how many went."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    steps = [(record or {}).get("step") for record in map(_parse, lines)]
    kept = [line for line, n in zip(lines, steps, strict=True) if isinstance(n, int | float) and n <= last_step]
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))
    return len(lines) - len(kept)


def read_records(file: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of an open file, and None for an invalid line. An unfinished last line is left out."""
    return (_parse(line) for line in file if line.endswith(b"\n"))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file that is whole. Raises ValueError for an invalid line, OSError where there is no file."""
    return [json.loads(line) for line in file.read_bytes().splitlines()]  # bytes: a text may have U+2028 in it


class JsonlTail:
    """Follows a file that another process appends to, and returns each finished line once.

    `newest_bytes`: at the first read only about this much of the file's end; None reads all of it.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None):
        self._path = path
        self._newest_bytes = newest_bytes
        self._offset = 0
        self._inode = 0

    def new_records(self) -> tuple[list[dict[str, Any]], bool]:
        """The records since the last call, and whether the file started over (was cut back or replaced)."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return [], False
        with file:
            status = os.fstat(file.fileno())
            restarted = self._inode != 0 and (status.st_ino != self._inode or status.st_size < self._offset)
            if restarted or self._inode == 0:
                self._offset = 0 if self._newest_bytes is None else max(0, status.st_size - self._newest_bytes)
            self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read()
        self._offset += data.rfind(b"\n") + 1
        return [record for record in read_records(data.splitlines(keepends=True)) if record is not None], restarted


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line's object, or None: a reader must survive whatever a crash left in a file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
