"""A checkpoint's files, written on a thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from asyncrl.errors import WaitTimeoutError


class BackgroundWrite:
    """One piece of writing, begun at once. The thread ends with the process: what it has not finished is of no use."""

    def __init__(self, write: Callable[[], object], ended: Callable[[], None] = lambda: None):
        """`ended` is called on the thread, however the writing ends."""
        self._ended = ended
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long it took, once it is done."""
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()

    def _run(self, write: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            write()
        except BaseException as error:
            self._error = error
        del write  # with the copy that it has written
        self.seconds = time.monotonic() - began
        self._done.set()
        self._ended()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def check(self) -> None:
        """Raise what went wrong, if it is done."""
        if self.is_done and self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Block until it is done. Raises what went wrong, or WaitTimeoutError."""
        if not self._done.wait(timeout_s):
            raise WaitTimeoutError(f"a checkpoint was not written within {timeout_s:g} s (learner.wait_timeout_s)")
        self.check()
