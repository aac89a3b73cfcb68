"""Is a journal sound? Asked before anything is written to it, so that what is damaged stays as it was found."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from urllib.parse import quote

from asyncrl.errors import BadStateError
from asyncrl.journal.database import SCHEMA, WAY_OUT, journal_name
from asyncrl.journal.digest import CommitMark, ContentDigest
from asyncrl.journal.segments import PLACE, Place, read_place, segment_path

_SMALLEST_BYTES = 512
"""Of any SQLite database."""
_WAL_MODE_AT, _WAL_MODE = 18, b"\x02\x02"
"""Versions for writing and reading in the file's header. SQLite silently only reads what needs a newer one to write."""


def check_journal(path: Path, mark: CommitMark, saved_step: int = 0) -> bool:
    """Whether there is a journal. Raises BadStateError with what is wrong with it, and leaves it as it is.

    Not looked at are the groups of steps up to `saved_step`: a checkpoint holds them, and there may be many.
    """
    if not path.exists() or not _is_begun(path, mark):
        return False
    if problem := _find_damage(path, mark, saved_step):
        raise BadStateError(f"{journal_name(path)} {problem}. {WAY_OUT}")
    return True


def _is_begun(path: Path, mark: CommitMark) -> bool:
    """False for the empty file of a run that died before its first commit."""
    if mark.read():
        return True
    with closing(_read_only(path)) as db:
        return bool(scalar(db, "SELECT COUNT(*) FROM sqlite_master"))


def _find_damage(path: Path, mark: CommitMark, saved_step: int) -> str | None:
    """What is wrong with pages, indexes, rows, payloads, the account or the last commit. Raises sqlite3.Error, too."""
    marked = mark.read()  # before the rows: a learner that lives would write it after them
    if (size := path.stat().st_size) < _SMALLEST_BYTES:
        return f"has only {size} bytes"  # and SQLite would remove the write-ahead log of a file that it finds empty
    if (mode := _read_bytes(path, _WAL_MODE_AT, 2)) != _WAL_MODE:
        return (
            f"is damaged: its header asks for file format {tuple(mode)}, and has been written with {tuple(_WAL_MODE)}"
        )
    with closing(_read_only(path)) as db:
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("BEGIN")  # one state of the file for all that follows
        return (
            _schema_problem(db)
            or _page_problem(db)
            or _commit_problem(db, marked, mark.path)
            or _row_problem(db)
            or _payload_problem(db, path, saved_step)
            or _account_problem(db)
        )


def scalar(db: sqlite3.Connection, query: str, values: tuple[int | str, ...] = ()) -> int:
    return int(db.execute(query, values).fetchone()[0])


def _read_only(path: Path) -> sqlite3.Connection:
    """It reads the write-ahead log, and does not move it into the file on closing."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)


def _read_bytes(path: Path, offset: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(count)


def _schema_problem(db: sqlite3.Connection) -> str | None:
    found = scalar(db, "PRAGMA user_version")
    return None if found == SCHEMA else f"has schema {found}, and this version of asyncrl reads schema {SCHEMA}"


def _page_problem(db: sqlite3.Connection) -> str | None:
    problems = [str(row[0]) for row in db.execute("PRAGMA integrity_check(3)")]
    return None if problems == ["ok"] else f"is damaged: {'; '.join(problems)}"


def _commit_problem(db: sqlite3.Connection, marked: int, mark: Path) -> str | None:
    commits = scalar(db, "SELECT commits FROM seal")
    if commits >= marked:
        return None
    return (
        f"ends at commit {commits}, but commit {marked} was made: its write-ahead log is damaged or missing, or the "
        "machine lost power under trainer.durability=process. Acknowledged groups are missing. To accept their loss, "
        f"remove {mark}"
    )


def _row_problem(db: sqlite3.Connection) -> str | None:
    sealed = db.execute("SELECT digest FROM seal").fetchone()[0]
    if ContentDigest.of(db).to_bytes() != sealed:
        return "is damaged: its rows are not those that were written (digest)"
    return None


def _payload_problem(db: sqlite3.Connection, path: Path, saved_step: int) -> str | None:
    saved = "SELECT 1 FROM consumption WHERE consumption.ticket_id = groups.ticket_id AND step <= ?"
    query = f"SELECT ticket_id, {PLACE} FROM groups WHERE NOT EXISTS ({saved}) ORDER BY segment, offset"
    for number, rows in groupby(db.execute(query, (saved_step,)), key=itemgetter(1)):
        file = segment_path(path, number)
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return f"is damaged: {file} with its groups is missing"
        try:
            for ticket_id, *place in rows:
                if read_place(fd, Place(*place)) is None:
                    return (
                        f"is damaged: the group of ticket {ticket_id} in {file} does not have its checksum. If the "
                        "machine lost power under trainer.durability=process, the groups that were acknowledged last "
                        f"are missing; to accept their loss, remove {path}-wal and {path}.commits"
                    )
        finally:
            os.close(fd)
    return None


def _account_problem(db: sqlite3.Connection) -> str | None:
    counters = dict(db.execute("SELECT name, count FROM ledger"))
    issued, trained = counters.get("issued", 0), counters.get("trained", 0)
    dropped = counters.get("dropped_stale", 0)
    live, consumed = (scalar(db, f"SELECT COUNT(*) FROM {table}") for table in ("tickets", "consumption"))
    if issued == trained + dropped + live and consumed == trained:
        return None
    return (
        f"does not add up: {issued} tickets issued, {trained} trained, {dropped} dropped, but {live} are live and "
        f"{consumed} consumed"
    )
