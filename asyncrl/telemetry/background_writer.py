"""Writing on a thread, so that training need not wait for a disk."""

from __future__ import annotations

import threading
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
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MAX_WAITING):
            self._finish_first()
        self._waiting.append(self._pool.submit(work, *arguments))

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
        self._newest: bytes | None = None
        self._has_newer = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._problem: OSError | None = None

    def write(self, data: bytes) -> None:
        """Write now: the content is in the file on return."""
        with self._writing:
            self._newest = None
            write_atomically(self._path, data, durable=False)

    def write_soon(self, data: bytes) -> None:
        """Write on the thread. Raises the OSError of an earlier call that could not be written."""
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        self._newest = data
        self._has_newer.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"writes {self._path.name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while self._has_newer.wait():
            self._has_newer.clear()
            with self._writing:
                data, self._newest = self._newest, None
                if data is not None:
                    try:
                        write_atomically(self._path, data, durable=False)
                    except OSError as error:
                        self._problem = error
