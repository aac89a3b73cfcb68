"""Errors for readers of a run directory, which may be another user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import UserError


def is_there(path: Path) -> bool:
    """True if a file or folder of a run exists. Raises UserError if it, or the folder above it, cannot be read."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:
        raise cannot_read(path, problem) from None
    return True


@contextmanager
def unreadable_as_user_error() -> Iterator[None]:
    """Turn the OSError of a file that cannot be read within the block into a UserError that names the file."""
    try:
        yield
    except OSError as problem:
        if not isinstance(problem.filename, str | bytes):  # of a terminal or a connection
            raise
        raise cannot_read(Path(os.fsdecode(problem.filename)), problem) from None


def cannot_read(path: Path, problem: OSError) -> UserError:
    return UserError(f"cannot read {path}: {problem.strerror}. Restore it, make it readable, or copy the run again")
