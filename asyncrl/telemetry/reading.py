"""For those who only look at a run: its directory may be another user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import UserError


def is_there(path: Path) -> bool:
    """A file or folder of a run. Raises UserError where it cannot be read, or what it is in cannot be looked into."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:
        raise cannot_read(path, problem) from None
    return True


@contextmanager
def telling_unreadable() -> Iterator[None]:
    """A file that cannot be read within is a UserError that names it."""
    try:
        yield
    except OSError as problem:
        if not isinstance(problem.filename, str | bytes):  # of a terminal or a connection
            raise
        raise cannot_read(Path(os.fsdecode(problem.filename)), problem) from None


def cannot_read(path: Path, problem: OSError) -> UserError:
    fix = "Restore it, or copy the run directory again"
    if isinstance(problem, PermissionError):
        fix = (
            "Work as the user whose run it is, or let that user make it readable (chmod -R a+rX RUN, and chmod a+x for "
            "the folders above it)"
        )
    return UserError(f"cannot read {path}: {problem.strerror}. {fix}")
