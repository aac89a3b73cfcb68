"""A small file that is replaced again and again, of which only the newest content counts."""

from __future__ import annotations

import threading
from pathlib import Path

from asyncrl.telemetry.jsonl import write_atomically


class LatestFile:
    """Readers see one content or the next. Replacing a file waits for the disk on ext4, milliseconds on a busy one: a
    thread does that, and what it has not come to when something newer is there is never written.
    """

    def __init__(self, path: Path):
        self._path = path
        self._newest: bytes | None = None
        self._is_there = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._problem: OSError | None = None

    def write(self, data: bytes) -> None:
        """It is in the file on return."""
        with self._writing:
            self._newest = None
            write_atomically(self._path, data, durable=False)

    def write_soon(self, data: bytes) -> None:
        """Raises the OSError of an earlier one that could not be written."""
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        self._newest = data
        self._is_there.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"writes {self._path.name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while self._is_there.wait():
            self._is_there.clear()
            with self._writing:
                data, self._newest = self._newest, None
                if data is not None:
                    try:
                        write_atomically(self._path, data, durable=False)
                    except OSError as error:
                        self._problem = error
