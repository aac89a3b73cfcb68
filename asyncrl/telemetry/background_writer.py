"""Work that its caller need not wait for, in order, on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_WAITING = 8
"""Then the caller waits after all: memory is bounded."""
DEADLINE_S = 120.0


class BackgroundWriter:
    """Of one caller's thread. What a piece of work raises, the caller's next call raises."""

    def __init__(self, name: str):
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: deque[Future[Any]] = deque()

    def do(self, work: Callable[..., Any], *arguments: Any) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._finish_first()
        self._waiting.append(self._pool.submit(work, *arguments))

    def wait(self) -> None:
        """Until all of it is done."""
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
