"""Memory of a demo: the most that all its processes have held at once."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import TracebackType

import psutil


class PeakMemory:
    """Looks every `every_s` seconds at this process and all under it.

    Example:
        with PeakMemory() as memory:
            ...
        print(memory.gib)
    """

    def __init__(self, every_s: float = 2.0):
        self.gib = 0.0
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.gib = max(self.gib, memory_of_tree(os.getpid()))
            if self._ended.wait(self._every_s):
                return


def memory_of_tree(pid: int) -> float:
    """GiB of a process and all under it. Pages that processes share count once; elsewhere than on Linux, for each."""
    top = psutil.Process(pid)
    found = 0
    for process in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
            told = process.memory_full_info()
            found += getattr(told, "pss", told.rss)
    return found / 2**30
