"""failure.json: the reason a run stopped, for launcher, scripts and later readers, and the errors of reading.

Only the process that has the run directory to itself writes it: the learner (lock.py), and after its end the launcher,
where a server ended the run. A server by itself writes nothing there: that it stops is not the end of the run.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from asyncrl.errors import BadStateError, LearnerLeftError, UserError, WaitTimeoutError
from asyncrl.journal.full_disk import causes, describe_full_disk, is_disk_full
from asyncrl.telemetry.recorder import read_status


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


logger = logging.getLogger(__name__)

FAILURE_FILE = "failure.json"
Kind = Literal["bad_state", "disk_full", "timed_out", "user_error"]
RESERVED_FILE = f".{FAILURE_FILE}.room"
"""The disk space that a run's failure.json will need, while the learner is at work."""
_RESERVED_BYTES = 8192
_LONGEST_REASON = 1500
"""Characters of a saved reason; with four bytes each they fit into the reserved space, and so does the rest."""


@dataclass(frozen=True)
class Failure:
    service: str
    kind: Kind
    reason: str
    time: float
    """Unix time."""
    step: int | None = None
    """The learner's last step that the run's status named."""


def failure_of(error: BaseException, service: str, run_dir: Path) -> Failure | None:
    """Describe an error as a failure; None for a crash: anything unforeseen."""
    kind, lost = kind_of(error), describe_lost(run_dir) if _is_of_folder(error, run_dir) else ""
    if lost and kind in (None, "bad_state"):
        return Failure(service, "bad_state", f"{lost} ({error})", time.time())
    if kind is None:
        return None
    reason = describe_full_disk(error, run_dir) if kind == "disk_full" else str(error)
    step = read_status(run_dir).get("step")
    return Failure(service, kind, reason, time.time(), step if isinstance(step, int) else None)


def describe_lost(run_dir: Path, file: str = "") -> str:
    """Reason that a run under way cannot use its directory any more, and the fix; empty: it can. `file`: one that is
    there as long as the run is."""
    then = "and continue with --resume, or begin a new run"
    if not run_dir.is_dir() or not (run_dir / file).exists():
        return (
            f"the run directory {run_dir} is gone: it was deleted or moved while the run was at work, with its journal "
            f"and its checkpoints. Put it back {then}"
        )
    if not os.access(run_dir, os.W_OK | os.X_OK):
        return (
            f"the run directory {run_dir} cannot be written any more: its rights, its owner or its file system have "
            f"changed while the run was at work. Make it writable {then}"
        )
    return ""


def _is_of_folder(error: BaseException, folder: Path) -> bool:
    """True if the error, or a cause of it, is of a file below the folder, or of SQLite, which names none."""
    for link in causes(error):
        named = link.filename if isinstance(link, OSError) else None
        if isinstance(link, sqlite3.Error) or (
            isinstance(named, str | bytes) and Path(os.fsdecode(named)).absolute().is_relative_to(folder.absolute())
        ):
            return True
    return False


def kind_of(error: BaseException) -> Kind | None:
    """Classify an error; None for a crash or LearnerLeftError."""
    if isinstance(error, LearnerLeftError):
        return None
    if isinstance(error, UserError):
        return "user_error"
    if is_disk_full(error):
        return "disk_full"
    if isinstance(error, WaitTimeoutError):
        return "timed_out"
    return "bad_state" if isinstance(error, BadStateError) else None


class ReservedFailureFile:
    """Context that reserves disk space for failure.json so that it can be written on a full disk."""

    def __init__(self, file: Path):
        self._file = file
        self._reserved = file.with_name(f".{file.name}.room")

    def __enter__(self) -> Self:
        """Reserve the space. Raises OSError where there is none."""
        self._reserved.unlink(missing_ok=True)  # of a process that was killed, maybe another user's
        try:
            self._reserved.write_bytes(b" " * _RESERVED_BYTES)
        except OSError:
            self.__exit__()
            raise
        return self

    def save(self, failure: Failure) -> bool:
        """Save completely or not at all; True if saved. A failed save is logged."""
        record = asdict(failure) | {"reason": failure.reason[:_LONGEST_REASON]}
        text = json.dumps(record, ensure_ascii=False, indent=2).encode(errors="backslashreplace")
        try:
            with self._reserved.open("r+b") as file:  # in place: a full disk has no other blocks
                file.write(text.ljust(_RESERVED_BYTES - 1) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._reserved.replace(self._file)
        except OSError as problem:
            logger.error("the reason could not be saved in %s: %s", self._file, problem)
            return False
        return True

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._reserved.unlink()


def refuse_bad_state(run_dir: Path) -> None:
    """Refuse an unattended attempt: BadStateError where the run stopped in bad state, UserError where that cannot be
    read."""
    file = run_dir / FAILURE_FILE
    failure = read_failure(run_dir) if is_there(file) else None
    if failure is not None and failure.kind == "bad_state":
        at = f" at step {failure.step}" if failure.step is not None else ""
        raise BadStateError(
            f"the run in {run_dir} stopped in bad state{at}: {failure.reason}. When the cause is fixed, continue by "
            f"hand with `asyncrl learn CONFIG --resume`, or remove {file}"
        )


def read_failure(run_dir: Path, name: str = FAILURE_FILE) -> Failure | None:
    """Read why a run stopped; None if it has not failed, or its file is not one of ours."""
    try:
        return Failure(**json.loads((run_dir / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
