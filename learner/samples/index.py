"""The index of samples, as the learner writes it: one transaction per step, beside the journal.

It is derived: no seal, no syncs, and what a crash leaves out is written again with the steps that are made again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from learner.samples.rows import IndexedGroup, PromptText, TrainedBatch, index_group
from learner.samples.tables import INDEX_FILE, SCHEMA, TABLES, insert_groups, remove_groups
from learner.tickets import ReceivedGroup

logger = logging.getLogger(__name__)


class SampleIndex:
    """One writer (the learner); any number of readers. The file comes with the first write."""

    def __init__(self, run_dir: Path):
        self._path = Path(run_dir) / INDEX_FILE
        self._open: sqlite3.Connection | None = None

    def write(self, step: int, version: int, received: Sequence[ReceivedGroup], trained: TrainedBatch) -> None:
        """The batch that `version` has consumed at `step`."""
        groups: list[IndexedGroup] = []
        row = token = 0
        for item in received:
            rows, tokens = len(item.group.trajectories), int(item.group.lengths.sum())
            part = trained.part(row, rows, token, tokens)
            prompt = PromptText.of(item.ticket.prompt)
            groups.append(index_group(item.group, prompt, step=step, version=version, trained=part))
            row, token = row + rows, token + tokens
        with self._db:
            self._db.execute("BEGIN")
            insert_groups(self._db, groups)

    def truncate_after(self, step: int) -> None:
        """Forget what was trained later: the run goes on from there, with other groups."""
        if self._path.exists():
            with self._db:
                self._db.execute("BEGIN")
                dropped = remove_groups(self._db, "step > ?", (step,))
            if dropped:
                logger.info("resuming after step %d: dropped %d later groups of %s", step, dropped, self._path.name)

    def forget_tokens(self, before_step: int) -> None:
        """The journal keeps no groups of earlier steps: nobody can look at their tokens any more."""
        if self._path.exists():
            with self._db:
                self._db.execute(
                    "DELETE FROM trained_tokens WHERE ticket_id IN (SELECT ticket_id FROM groups WHERE step < ?)",
                    (before_step,),
                )

    @property
    def _db(self) -> sqlite3.Connection:
        if self._open is None:
            self._open = open_index(self._path)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def open_index(path: Path) -> sqlite3.Connection:
    """To write. One that is damaged or of another schema is begun anew, with a warning."""
    try:
        return _open(path)
    except sqlite3.DatabaseError as problem:
        if getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_SCHEMA) not in _USELESS:
            raise
        logger.warning("%s cannot be used (%s): it is begun anew, without the samples of earlier steps", path, problem)
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            path.with_name(name).unlink(missing_ok=True)
        return _open(path)


_USELESS = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA)


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"schema {schema}, expected {SCHEMA}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # a power cut may damage it: it can be made again
        if schema == 0:
            db.executescript(f"BEGIN; {TABLES} COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
