"""An asyncio event loop whose clock jumps to the next timer: an hour of waiting takes no time, and no noise.

The same program gives the same events in the same order on every machine. A program in which everybody waits for
somebody else ends with an error instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


class NothingToWaitFor(RuntimeError):
    """Every task waits, and no timer is set: a deadlock."""


class _JumpingSelector(selectors.SelectSelector):
    """Does not wait for sockets; tells the loop's clock how long it would have waited."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingToWaitFor(f"at {self.now_s:g} s of virtual time every task waits for another one")
        self.now_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run at once, on this thread: the clock must not jump while another thread works."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` without the waiting, `time.monotonic` the loop's clock. Raises NothingToWaitFor on a deadlock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        clock = runner.get_loop().time
        with patch("time.monotonic", clock):
            return runner.run(main)
