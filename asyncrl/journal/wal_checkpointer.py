"""The thread that copies the journal's write-ahead log into its file, so that no commit waits for it.

SQLite lets one connection copy while another appends. Left to itself it copies within a commit, and the network thread
would stand still until all is on the disk. Files of groups that are forgotten are deleted here, too: once the
transaction that forgot them is on the disk, since a row must never name a file that is gone.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from asyncrl.journal.segments import Segments


class WalCheckpointer:
    """Copies in the background. `copy_soon` never waits; an error is raised by the next `check`."""

    def __init__(self, journal: Path, segments: Segments):
        self._journal = journal
        self._segments = segments
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal-log")
        self._copies: deque[Future[None]] = deque()

    def copy_soon(self) -> None:
        self._copies.append(self._thread.submit(self._copy, "PASSIVE"))

    def check(self) -> None:
        """Raises what stopped the copying: a full disk, an unreadable file."""
        while self._copies and self._copies[0].done():
            self._copies[0].result()
            self._copies.popleft()

    def copy_all(self) -> None:
        """Empty the log."""
        self._thread.submit(self._copy, "TRUNCATE").result()

    def close(self) -> None:
        """Wait for a copy that is under way."""
        self._thread.shutdown(cancel_futures=True)

    def _copy(self, mode: str) -> None:
        """Copy as far as the log reaches now. It starts again from its beginning once all of it is copied."""
        obsolete = list(self._segments.obsolete)  # by transactions that are in the log by now
        self._segments.sync()  # what the rows name: the file without its log is whole, too
        with closing(sqlite3.connect(self._journal, isolation_level=None)) as db:
            busy, pages, copied = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        if busy or copied < pages:  # a reader of the log holds it up
            return
        for path in obsolete:
            path.unlink(missing_ok=True)
            self._segments.obsolete.remove(path)
