"""The index of samples, as the learner writes it: one transaction per step, beside the journal.

It is derived: no seal, no syncs, and what a crash leaves out is written again with the steps that are made again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.journal.sample_rows import IndexedGroup, PromptText, TrainedBatch, index_group
from asyncrl.journal.sample_tables import INDEX_FILE, SCHEMA, TABLES, insert_groups, remove_groups
from asyncrl.run_folder.full_disk import find_no_room
from protocol.messages import Group, Prompt

logger = logging.getLogger(__name__)


class SampleIndex:
    """One writer (the learner); any number of readers. The file comes with the first write."""

    def __init__(self, run_dir: Path):
        self._path = Path(run_dir) / INDEX_FILE
        self._open: sqlite3.Connection | None = None

    def write(self, step: int, version: int, batch: Sequence[tuple[Prompt, Group]], trained: TrainedBatch) -> None:
        """The batch that `version` has consumed at `step`."""
        groups: list[IndexedGroup] = []
        row = token = 0
        for prompt, group in batch:
            rows, tokens = len(group.trajectories), int(group.lengths.sum())
            part = trained.part(row, rows, token, tokens)
            text = PromptText.of(prompt)
            groups.append(index_group(group, text, step=step, version=version, trained=part))
            row, token = row + rows, token + tokens
        try:
            self._insert(groups)
        except sqlite3.DatabaseError as problem:
            if not _is_useless(problem):
                raise
            self.close()
            _remove(self._path, problem)
            self._insert(groups)

    def _insert(self, groups: Sequence[IndexedGroup]) -> None:
        with self._transaction() as db:
            insert_groups(db, groups)

    def truncate_after(self, step: int) -> None:
        """Forget what was trained later: the run goes on from there, with other groups."""
        if self._path.exists():
            with self._transaction() as db:
                dropped = remove_groups(db, "step > ?", (step,))
            if dropped:
                logger.info("resuming after step %d: dropped %d later groups of %s", step, dropped, self._path.name)

    def forget_tokens(self, before_step: int) -> None:
        """The journal keeps no groups of earlier steps: nobody can look at their tokens any more."""
        if self._path.exists():
            with self._transaction() as db:
                db.execute(
                    "DELETE FROM trained_tokens WHERE ticket_id IN (SELECT ticket_id FROM groups WHERE step < ?)",
                    (before_step,),
                )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises OSError where there is no room and SQLite does not say so."""
        try:
            if self._open is None:
                self._open = open_index(self._path)
            with self._open as db:
                db.execute("BEGIN")
                yield db
        except sqlite3.Error as problem:
            if full := find_no_room(problem, self._path):
                raise full from problem
            raise

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def open_index(path: Path) -> sqlite3.Connection:
    """To write. One that is damaged or of another schema is begun anew, with a warning."""
    try:
        return _open(path)
    except sqlite3.DatabaseError as problem:
        if not _is_useless(problem):
            raise
        _remove(path, problem)
        return _open(path)


def _is_useless(problem: sqlite3.DatabaseError) -> bool:
    code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_SCHEMA)  # the latter: our own finding
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA)


def _remove(path: Path, problem: sqlite3.DatabaseError) -> None:
    logger.warning(
        "%s cannot be used (%s): it is begun anew. When the run is over, asyncrl inspect %s --reindex adds the samples "
        "of earlier steps",
        path,
        problem,
        path.parent,
    )
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)


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
