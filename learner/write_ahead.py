"""The journal's write-ahead log is copied into its file by a thread of its own, so that no commit waits for it.

SQLite lets one connection copy while another appends. Left to itself it copies within a commit: every 64 MiB the
exchange would stand still until 128 MiB are on the disk.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path


class LogCopier:
    """`copy_soon` never waits. What went wrong meanwhile is raised by the next `check`."""

    def __init__(self, path: Path):
        self._path = path
        self._wanted = threading.Event()
        self._closing = False
        self._failure: sqlite3.Error | None = None
        self._copying = threading.Lock()
        self._thread: threading.Thread | None = None

    def copy_soon(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="journal-log", daemon=True)
            self._thread.start()
        self._wanted.set()

    def check(self) -> None:
        """Raises what stopped the copying: a full disk, an unreadable file."""
        if self._failure is not None:
            raise self._failure

    def paused(self) -> threading.Lock:
        """A lock. Whoever holds it may copy instead."""
        return self._copying

    def close(self) -> None:
        """Waits for a copy that is under way."""
        self._closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            db = sqlite3.connect(self._path, isolation_level=None)
            try:
                while True:
                    self._wanted.wait()
                    self._wanted.clear()
                    if self._closing:
                        return
                    with self._copying:
                        # As far as the log reaches now. It starts again from its beginning once all of it is copied.
                        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                db.close()
        except sqlite3.Error as problem:
            self._failure = problem
