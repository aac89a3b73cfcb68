"""Recognise and describe a full disk, which libraries report in many ways."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
_PROBE_BYTES = MIB
"""Bytes that must fit if there is room. A database needs less at once: 32 KiB of shared memory for 16 MiB of its
log."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, in the quota, and under the process's limit on file sizes."""
_FULL_TEXTS = (*(os.strerror(number) for number in _FULL), "PytorchStreamWriter failed writing", "unexpected pos")
"""Messages of libraries that write files without Python's help (safetensors, torch; the last is of torch's last
write)."""


def is_disk_full(error: BaseException) -> bool:
    """True if the error or a cause of it is a full disk, an exceeded quota or the limit on file sizes."""
    for link in causes(error):
        if isinstance(link, OSError):
            if link.errno in _FULL:
                return True
        elif any(text in str(link) for text in (*_FULL_TEXTS, "database or disk is full")):
            return True
    return False


def find_no_room(error: BaseException, database: Path) -> OSError | None:
    """Find out whether SQLite had no room for one of its files; None where `error` has another reason.

    It says so only where a write found a full disk. All else is an I/O error, or a file that cannot be opened: a
    quota, a limit on file sizes, shared memory or a log that cannot be made.
    """
    if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return None
    limit = _file_size_limit()
    try:
        for file in (database.with_name(database.name + end) for end in ("", "-wal", "-shm")):
            if limit is not None and file.exists() and file.stat().st_size + _PROBE_BYTES > limit:
                return OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
        with tempfile.TemporaryFile(dir=database.parent) as probe:
            probe.write(b" " * _PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as problem:
        return OSError(problem.errno, problem.strerror, str(database)) if problem.errno in _FULL else None
    return None


def describe_full_disk(
    error: BaseException, run_dir: Path, then: str = "start again, with --resume if the run had begun"
) -> str:
    """Name the directory, its free space and the fix."""
    found = [link for link in causes(error) if isinstance(link, OSError)]
    named = next((link.filename for link in found if link.filename), None)
    folder = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else run_dir
    if not folder.is_dir():
        folder = run_dir
    free = room_left(folder)
    limit = _file_size_limit()
    if limit is not None and any(link.errno == errno.EFBIG for link in found):
        return (
            f"a file in {folder} is as large as this process may make it: {limit / MIB:,.1f} MiB (ulimit -f; {free}): "
            f"{error}. Raise the limit and {then}"
        )
    return f"the disk of {folder} is full ({free}): {error}. Make room (old runs, trainer.save_limit) and {then}"


def room_left(folder: Path) -> str:
    return f"{(shutil.disk_usage(folder).free if folder.is_dir() else 0) / MIB:,.1f} MiB free"


def _file_size_limit() -> int | None:
    """The process's limit in bytes; None for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
