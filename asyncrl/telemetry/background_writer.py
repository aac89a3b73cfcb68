"""Writing on a thread, so that training need not wait for a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
