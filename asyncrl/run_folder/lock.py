"""One learner per run directory: two would train the same groups. And one launcher: two would mix configurations."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncrl.errors import RunTakenError, UserError
from asyncrl.journal.full_disk import is_disk_full
from asyncrl.run_folder.failure import FAILURE_FILE, ReservedFailureFile, failure_of, refuse_bad_state
from asyncrl.telemetry.recorder import is_finished, read_status

LEARNER_LOCK = "learner.lock"
LAUNCHER_LOCK = "launcher.lock"
RETRY_S = 0.5
"""A process that only looks at a lock holds it, too, for a moment."""
_POLL_S = 0.01


@contextmanager
def holding(run_path: Path, file: str) -> Iterator[None]:
    """Hold a lock of the directory. The lock's file goes with it, and the directory, if nothing else is in it."""
    made = [folder for folder in (run_path, *run_path.parents) if not os.path.lexists(folder)]
    descriptor = lock_run(run_path, file)
    try:
        yield
    finally:
        with suppress(OSError):
            if _is_same_file(run_path / file, descriptor):
                os.unlink(run_path / file)  # while it is held: a moment later it may be another's
        os.close(descriptor)
        for folder in made:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def lock_run(run_path: Path, file: str = LEARNER_LOCK) -> int:
    """Hold the directory until the returned descriptor is closed or the process ends, however it ends.

    Raises RunTakenError where another process has it, UserError where this user may not, OSError where the disk is full
    or the file system has no locks.
    """
    deadline = time.monotonic() + RETRY_S
    while True:
        descriptor = _open(run_path, file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(run_path / file, descriptor):  # its last owner may have removed it meanwhile
                os.pwrite(descriptor, b"%-19d\n" % os.getpid(), 0)
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _taken(run_path, file, _owner(descriptor)) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_POLL_S)


def _open(run_path: Path, file: str) -> int:
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        return os.open(run_path / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise _not_ours(run_path / file, error) from None


def _is_same_file(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _not_ours(file: Path, error: OSError, verb: str = "write") -> UserError:
    return UserError(f"cannot {verb} {file}: {error.strerror}. Run as the owner of the run, or set another run_dir=...")


def is_over(run_path: Path) -> bool:
    """True if the run is finished, and no learner holds it as far as this user may see."""
    if not is_finished(run_path):
        return False
    try:
        return not holder(run_path, LEARNER_LOCK)
    except UserError:
        return True


def is_starting(run_path: Path) -> bool:
    """True if a learner on this machine holds the directory and has said nothing in its status.json yet, as far as this
    user may see: it looks at its rows, or loads its model."""
    try:
        taken_at = os.stat(run_path / LEARNER_LOCK).st_mtime  # its pid was written into it then
        said_at = read_status(run_path).get("time") or 0.0
        return said_at < taken_at and bool(holder(run_path, LEARNER_LOCK))
    except (OSError, UserError):
        return False


def refuse_busy(run_path: Path, *files: str) -> None:
    """Raise RunTakenError if one of these locks (default: both) is held; checks the launcher's first: a check takes the
    lock for a moment, in which a learner that the launcher restarts could not."""
    for file in files or (LAUNCHER_LOCK, LEARNER_LOCK):
        owner = holder(run_path, file)
        if owner:
            raise _taken(run_path, file, owner)


def holder(run_path: Path, file: str) -> str:
    """Pid of the lock's holder, or `unknown`; empty if free."""
    try:
        descriptor = os.open(run_path / file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise _not_ours(run_path / file, error, "read") from None
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
        f"another {file.removesuffix('.lock')} (process {owner}) works in {run_path}. Wait for its end, stop it, or "
        "set another run_dir"
    )


class LearnerLock:
    """A context that holds the run directory for one learner. What ends it is saved in `failure.json`, except crashes.

    Before `accept` the run is as it was: a configuration that is refused, or a disk without room to load, is no failure
    of the run. Only bad state is, such as a damaged journal. Entering raises RunTakenError, UserError, OSError where
    the disk is full, and with `unattended` BadStateError after bad state.
    """

    def __init__(self, run_path: Path, service: str = "learner", *, unattended: bool = False):
        self._run_path = run_path
        self._service = service
        self._unattended = unattended
        self._reserved = ReservedFailureFile(run_path / FAILURE_FILE)
        self._is_accepted = self._is_saved = False

    def __enter__(self) -> Self:
        launcher = holder(self._run_path, LAUNCHER_LOCK)
        if launcher not in ("", str(os.getppid())):  # it may start another learner at any time
            raise _taken(self._run_path, LAUNCHER_LOCK, launcher)
        with ExitStack() as resources:
            resources.enter_context(holding(self._run_path, LEARNER_LOCK))
            if self._unattended:  # the last learner may have met bad state since this one was started
                refuse_bad_state(self._run_path)
            try:
                resources.enter_context(self._reserved)
            except PermissionError as error:
                raise _not_ours(self._run_path, error) from None
            self._resources = resources.pop_all()
        return self

    def accept(self) -> None:
        """Clear the previous failure: the run begins or continues."""
        self._is_accepted = True
        (self._run_path / FAILURE_FILE).unlink(missing_ok=True)

    def save(self, error: BaseException) -> None:
        """Save a reason before everything is closed. The first one counts."""
        failure = failure_of(error, self._service, self._run_path)
        if failure and not self._is_saved and (self._is_accepted or failure.kind == "bad_state"):
            self._is_saved = self._reserved.save(failure)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if error is not None:
                self.save(error)
        finally:
            self._resources.close()
