"""Writing on a thread, so that training need not wait for a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import write_atomically

MAX_WAITING = 8
"""Pieces of work that may wait; then the caller waits, so that memory is bounded."""
DEADLINE_S = 120.0


class BackgroundWriter:
    """Does work in order on one thread, for one calling thread. Errors are raised by the caller's next call."""

    def __init__(self, name: str):
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: deque[Future[Any]] = deque()

    def do(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._waiting.append(self._pool.submit(work, *arguments))
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > MAX_WAITING):
            self._finish_first()

    def wait(self) -> None:
        """Block until all work is done."""
        while self._waiting:
            self._finish_first()

    def _finish_first(self) -> None:
        try:
            self._waiting.popleft().result(DEADLINE_S)
        except TimeoutError as error:
            raise OSError(f"{self._name} could not be written within {DEADLINE_S:g} s: is the disk there?") from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


class LatestFile:
    """A small file that is replaced again and again; only the newest content counts.

    Replacing a file waits for the disk on ext4, milliseconds on a busy one. `write_soon` leaves that to a thread,
    which skips contents that are outdated when it comes to them.
    """

    def __init__(self, path: Path):
        self._path = path
        self._background = BackgroundWriter(path.name)
        self._newest = b""
        self._is_queued = False

    def write(self, data: bytes) -> None:
        """Write now: the content is in the file on return."""
        self.write_soon(data)
        self._background.wait()

    def write_soon(self, data: bytes) -> None:
        """Write on the thread. Raises the OSError of an earlier call that could not be written."""
        self._newest = data
        if not self._is_queued:
            self._is_queued = True
            self._background.do(self._write)

    def _write(self) -> None:
        self._is_queued = False
        write_atomically(self._path, self._newest, durable=False)
