"""Memory of a demo: the most that all its processes have held at once."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")


class PeakMemory:
    """Looks every `every_s` seconds at this process and all under it; pages that processes share count once.

    Example:
        with PeakMemory() as memory:
            ...
        print(memory.gib)
    """

    def __init__(self, every_s: float = 2.0):
        self.gib = 0.0
        """0 where the system does not tell, which Linux alone does."""
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.gib = max(self.gib, memory_of_tree(os.getpid()))
            if self._ended.wait(self._every_s):
                return


def memory_of_tree(pid: int) -> float:
    """GiB of a process and all under it."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            # The name, which may hold anything, stands in brackets before the state and the parent.
            children[int((folder / "stat").read_text().rpartition(")")[2].split()[1])].append(int(folder.name))
    found, left = 0, [pid]
    while left:
        one = left.pop()
        left += children[one]
        with suppress(OSError):
            if match := re.search(r"(?m)^Pss: +(\d+) kB", (PROC / str(one) / "smaps_rollup").read_text()):
                found += int(match[1])
    return found / 2**20
