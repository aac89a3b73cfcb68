"""One learner per run directory: two would train the same groups. And one launcher: two would mix configurations."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl.errors import RunTakenError, UserError
from asyncrl.run_folder.full_disk import is_disk_full
from asyncrl.telemetry.recorder import is_finished

LEARNER_LOCK = "learner.lock"
LAUNCHER_LOCK = "launcher.lock"
LONGEST_LOOK_S = 0.5
"""Who only looks holds a lock, too, for a moment."""
_POLL_S = 0.01
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_HOLDERS = {LEARNER_LOCK: "learner", LAUNCHER_LOCK: "launcher"}


@contextmanager
def holding(run_path: Path, file: str) -> Iterator[None]:
    """The directory, with this lock. Of a run that did not begin neither stays. Raises what `lock_run` does."""
    made = [folder for folder in (run_path, *run_path.parents) if not os.path.lexists(folder)]
    try:
        descriptor = lock_run(run_path, file)
        try:
            yield
        finally:
            with suppress(OSError):
                if _is_there(run_path / file, descriptor):
                    os.unlink(run_path / file)  # while it is ours
            os.close(descriptor)
    finally:
        for folder in made:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def lock_run(run_path: Path, file: str = LEARNER_LOCK) -> int:
    """Hold the directory until the returned descriptor is closed or the process ends, however it ends.

    Raises RunTakenError where another one has it, UserError where this user may not or locks do not work, OSError where
    the disk is full.
    """
    deadline = time.monotonic() + LONGEST_LOOK_S
    while True:
        try:
            descriptor = _open(run_path, file)
        except FileNotFoundError as error:  # whoever made the directory has taken it away
            if time.monotonic() > deadline:
                raise not_ours(run_path / file, error) from None
            continue
        try:
            _flock(descriptor, fcntl.LOCK_EX, run_path)
            if not _is_there(run_path / file, descriptor):  # whoever had it has taken it away
                os.close(descriptor)
                continue
            _sign(descriptor, run_path / file)
            return descriptor
        except BlockingIOError:
            owner = _owner(descriptor)
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise _taken(run_path, file, owner) from None
            time.sleep(_POLL_S)
        except (OSError, UserError):
            os.close(descriptor)
            raise


def _flock(descriptor: int, how: int, run_path: Path) -> None:
    """Raises BlockingIOError where another process has it, UserError where there are no locks."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UserError(
            f"{run_path} lies on a file system without locks (flock: {error.strerror}). Mount it with them, or set "
            "another run_dir=..."
        ) from None


def _open(run_path: Path, file: str) -> int:
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        return os.open(run_path / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{run_path} cannot be a directory ({error.strerror}). Set another run_dir=...") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) or is_disk_full(error):
            raise
        raise not_ours(run_path / file, error) from None


def _is_there(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int, file: Path) -> None:
    """In place: a file that is there needs no new room."""
    try:
        os.pwrite(descriptor, b"%-19d\n" % os.getpid(), 0)
    except OSError as error:
        if not os.fstat(descriptor).st_size:
            os.unlink(file)
        raise OSError(error.errno, error.strerror, str(file)) from None


def not_ours(file: Path, error: OSError, verb: str = "write") -> UserError:
    return UserError(
        f"cannot {verb} {file}: {error.strerror}. Work as the user whose run it is, or set another run_dir=..."
    )


@contextmanager
def sole_launcher(run_path: Path) -> Iterator[None]:
    """Raises RunTakenError where there is another one, or a learner that was started without one."""
    with holding(run_path, LAUNCHER_LOCK):
        refuse_busy(run_path, LEARNER_LOCK)
        yield


def is_over(run_path: Path) -> bool:
    """As far as this process sees it: the run is finished, and no learner is there to continue it."""
    if not is_finished(run_path):
        return False
    try:
        return not holder(run_path, LEARNER_LOCK)
    except UserError:  # it may not look
        return True


def refuse_busy(run_path: Path, *files: str) -> None:
    """Only looks. Raises RunTakenError where one of these locks, or of all, is held; the launcher's is looked at first:
    the look itself holds the lock for a moment, and its learner may be about to come back."""
    for file in files or (LAUNCHER_LOCK, LEARNER_LOCK):
        owner = holder(run_path, file)
        if owner:
            raise _taken(run_path, file, owner)


def refuse_other_launcher(run_path: Path) -> None:
    """Of a learner. Raises RunTakenError where a launcher is at work that may start another one: not its parent."""
    owner = holder(run_path, LAUNCHER_LOCK)
    if owner not in ("", str(os.getppid())):
        raise _taken(run_path, LAUNCHER_LOCK, owner)


def holder(run_path: Path, file: str) -> str:
    """The process that holds this lock; empty where none does."""
    try:
        descriptor = os.open(run_path / file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise not_ours(run_path / file, error, "read") from None
    try:
        _flock(descriptor, fcntl.LOCK_SH, run_path)
    except BlockingIOError:
        return _owner(descriptor)
    finally:
        os.close(descriptor)
    return ""


def _owner(descriptor: int) -> str:
    """It may be about to say so."""
    deadline = time.monotonic() + LONGEST_LOOK_S
    while not (said := os.pread(descriptor, 64, 0).decode(errors="replace").strip()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return said or "unknown"


def _taken(run_path: Path, file: str, owner: str) -> RunTakenError:
    return RunTakenError(
        f"another {_HOLDERS[file]} (process {owner}) works in {run_path}. Wait for its end, stop it, or set another "
        "run_dir"
    )
