"""One learner per run directory: two would train the same groups. And one launcher: two would mix configurations."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import RunTakenError, UserError

LEARNER_LOCK = "learner.lock"
LAUNCHER_LOCK = "launcher.lock"
_WHOSE = "Work as the user whose run it is, or set another run_dir=..."
_HOLDERS = {LEARNER_LOCK: "learner", LAUNCHER_LOCK: "launcher"}


def lock_run(run_path: Path, file: str = LEARNER_LOCK) -> int:
    """Hold the directory until the returned descriptor is closed or the process ends, however it ends."""
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_path / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {run_path / file}: {error.strerror}. {_WHOSE}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(descriptor)
        os.close(descriptor)
        raise _taken(run_path, file, owner) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor


@contextmanager
def sole_launcher(run_path: Path) -> Iterator[None]:
    """Raises RunTakenError where there is another one, or a learner that was started without one."""
    descriptor = lock_run(run_path, LAUNCHER_LOCK)
    try:
        refuse_busy(run_path, LEARNER_LOCK)
        yield
    finally:
        os.close(descriptor)


def refuse_busy(run_path: Path, *files: str) -> None:
    """Only looks. Raises RunTakenError where one of these locks, or of all, is held; the launcher's is looked at first:
    the look itself holds the lock for a moment, and its learner may be about to come back."""
    for file in files or (LAUNCHER_LOCK, LEARNER_LOCK):
        owner = holder(run_path, file)
        if owner:
            raise _taken(run_path, file, owner)


def holder(run_path: Path, file: str) -> str:
    """The process that holds this lock; empty where none does."""
    try:
        descriptor = os.open(run_path / file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UserError(f"cannot read {run_path / file}: {error.strerror}. {_WHOSE}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(descriptor)
    finally:
        os.close(descriptor)
    return ""


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"


def _taken(run_path: Path, file: str, owner: str) -> RunTakenError:
    return RunTakenError(
        f"another {_HOLDERS[file]} (process {owner}) works in {run_path}. Wait for its end, stop it, or set another "
        "run_dir"
    )
