"""The thread that copies the journal's write-ahead log into its file, so that no commit waits for it.

SQLite lets one connection copy while another appends. Left to itself it copies within a commit, and the network thread
would stand still until all is on the disk. Files of groups that are forgotten are deleted here, too: once the
transaction that forgot them is on the disk, since a row must never name a file that is gone.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path


class WalCheckpointer:
    """Copies in the background. `copy_soon` never waits; an error is raised by the next `check`."""

    def __init__(self, path: Path, *, before: Callable[[], None]):
        """`before` a copy, what its rows name is brought to the disk: the file without its log is whole, too."""
        self._path = path
        self._before = before
        self._wanted = threading.Event()
        self._obsolete: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._closing = False
        self._failure: sqlite3.Error | OSError | None = None
        self.paused = threading.Lock()
        """A lock: its holder may copy instead."""
        self._thread: threading.Thread | None = None

    def copy_soon(self, then_delete: Iterable[Path] = ()) -> None:
        """Copy the log. `then_delete`: files that a committed transaction has made superfluous."""
        for path in then_delete:
            self._obsolete.put(path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="journal-log", daemon=True)
            self._thread.start()
        self._wanted.set()

    def check(self) -> None:
        """Raises what stopped the copying: a full disk, an unreadable file."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> list[Path]:
        """Waits for a copy that is under way. Returns the files that are still to be deleted."""
        self._closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        return self._take_obsolete()

    def _take_obsolete(self) -> list[Path]:
        return [self._obsolete.get_nowait() for _ in range(self._obsolete.qsize())]

    def _work(self) -> None:
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as db:
                while True:
                    self._wanted.wait()
                    self._wanted.clear()
                    if self._closing:
                        return
                    with self.paused:
                        self._copy(db)
        except (sqlite3.Error, OSError) as problem:
            self._failure = problem

    def _copy(self, db: sqlite3.Connection) -> None:
        """Copy as far as the log reaches now. It starts again from its beginning once all of it is copied."""
        superfluous = self._take_obsolete()
        self._before()
        busy, pages, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        is_whole = not busy and copied == pages  # else a reader of the log holds it up
        for path in superfluous:
            if is_whole:
                path.unlink(missing_ok=True)
            else:
                self._obsolete.put(path)
