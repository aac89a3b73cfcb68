"""Why a run stopped, as `failure.json` in its directory: for the launcher, for scripts, and for whoever looks later.

A full disk must not take the reason with it: each service reserves the room for it when it starts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from asyncrl.errors import BadStateError, UserError, WaitTimeoutError
from asyncrl.telemetry.recorder import STATUS_FILE

logger = logging.getLogger(__name__)

FAILURE_FILE = "failure.json"
Kind = Literal["bad_state", "disk_full", "timed_out", "user_error"]
_NO_CAUSES = ("user_error", "timed_out")
"""Of a failure of a later kind, the other ones included."""
_RESERVED_BYTES = 8192
_PROBE_BYTES = 65536
"""What must fit if there is room: more than any page of a database."""
MIB = 1 << 20
_LONGEST_REASON = 1500
"""Characters; four bytes each and everything else fit into what is reserved."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, in the quota, and under the process's limit on file sizes."""
_FULL_TEXTS = (*(os.strerror(number) for number in _FULL), "PytorchStreamWriter failed writing", "unexpected pos")
"""How libraries that write files without Python's help (safetensors, torch) say it; the last of torch's last write."""


@dataclass(frozen=True)
class Failure:
    service: str
    kind: Kind
    reason: str
    time: float
    """Unix time."""
    step: int | None = None
    """Of the learner, as the run's status said last."""


def reserve(run_dir: Path, service: str) -> bool:
    """Take the disk space that a reason needs, where there is a run directory. False where another has taken it."""
    file = _reserved(run_dir, service)
    is_new = not file.exists()
    if run_dir.is_dir() and os.access(run_dir, os.W_OK):  # a server may see the run of its learner read-only
        file.write_bytes(b" " * _RESERVED_BYTES)
    return is_new


def release(run_dir: Path, service: str) -> None:
    """The service ends, and has nothing to say any more."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _reserved(run_dir, service).unlink()


def save_failure(
    run_dir: Path, service: str, reason: str, *, kind: Kind = "bad_state", instead_of: Failure | None = None
) -> Path | None:
    """Write `failure.json`, complete or not at all. What is there already stays: it came first, and may be the cause.

    But a mistake of the user, such as a server that was refused, is no cause of a bad state, and neither is a wait
    that ran out. `instead_of` is of an earlier attempt: it gives way to whatever is no less.
    None where nothing could be written; the log has the reason in any case.
    """
    target, reserved = run_dir / FAILURE_FILE, _reserved(run_dir, service)
    earlier = read_failure(run_dir)
    if earlier and _weight(earlier.kind) + (earlier != instead_of) > _weight(kind):
        return target
    failure = Failure(service, kind, reason[:_LONGEST_REASON], time.time(), _last_step(run_dir))
    text = json.dumps(asdict(failure), ensure_ascii=False, indent=2)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        reserved.touch()
        with reserved.open("r+b") as file:  # in place, in blocks that are ours
            file.write(text.encode().ljust(_RESERVED_BYTES - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        reserved.replace(target)
    except OSError as problem:
        logger.error("the reason could not be saved in %s: %s", target, problem)
        return None
    return target


def _weight(kind: Kind) -> int:
    return _NO_CAUSES.index(kind) if kind in _NO_CAUSES else len(_NO_CAUSES)


def read_failure(run_dir: Path) -> Failure | None:
    """None if the run has not failed, or its file is not one of ours."""
    try:
        return Failure(**json.loads((run_dir / FAILURE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def failure_of(run_dir: Path, service: str) -> Failure | None:
    """None, too, where it is another service that has failed."""
    failure = read_failure(run_dir)
    return failure if failure and failure.service == service else None


def forget_vain_attempt(run_dir: Path, service: str) -> None:
    """The service starts again after a failure that was no cause of anything. A bad state is for the learner to forget,
    when it has accepted that the run goes on."""
    failure = failure_of(run_dir, service)
    if failure and failure.kind in _NO_CAUSES:
        forget_failure(run_dir, failure)


def forget_failure(run_dir: Path, earlier: Failure | None) -> None:
    """What was found at the start, unless it has made room for another since: that one is of now."""
    if earlier and read_failure(run_dir) == earlier:
        with suppress(OSError):  # gone already, or of a run that this service may only read
            (run_dir / FAILURE_FILE).unlink()


def kind_of(error: BaseException) -> Kind | None:
    """None for a crash: anything unforeseen."""
    if is_disk_full(error):
        return "disk_full"
    kinds: dict[type[Exception], Kind] = {
        WaitTimeoutError: "timed_out",
        BadStateError: "bad_state",
        UserError: "user_error",
    }
    return next((kind for known, kind in kinds.items() if isinstance(error, known)), None)


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is that a disk or a quota has no room left."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            return True
        if isinstance(link, sqlite3.Error) and "database or disk is full" in str(link):
            return True
        if not isinstance(link, OSError) and any(text in str(link) for text in _FULL_TEXTS):
            return True
    return False


def find_no_room(files: Sequence[Path]) -> OSError | None:
    """Why files that could not be written had no room, for libraries that do not say; None for another reason."""
    limit = _file_size_limit()
    for file in files:
        if limit is not None and file.exists() and file.stat().st_size + _PROBE_BYTES > limit:
            return OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    for folder in {file.parent for file in files}:
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b" " * _PROBE_BYTES)
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as problem:
            return OSError(problem.errno, problem.strerror, str(files[0])) if problem.errno in _FULL else None
    return None


def describe_full_disk(error: BaseException, run_dir: Path) -> str:
    """The directory, its free space and the fix."""
    found = [link for link in _chain(error) if isinstance(link, OSError)]
    named = next((link.filename for link in found if link.filename), None)
    folder = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else run_dir
    if not folder.is_dir():
        folder = run_dir
    free = f"{(shutil.disk_usage(folder).free if folder.is_dir() else 0) / MIB:,.1f} MiB free"
    limit = _file_size_limit()
    if limit is not None and any(link.errno == errno.EFBIG for link in found):
        return (
            f"a file in {folder} is as large as this process may make it: {limit / MIB:,.1f} MiB (ulimit -f; {free}): "
            f"{error}. Raise the limit and continue with --resume"
        )
    return (
        f"the disk of {folder} is full ({free}): {error}. "
        "Make room (old runs, trainer.save_limit) and continue with --resume"
    )


def _file_size_limit() -> int | None:
    """Bytes; None for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _reserved(run_dir: Path, service: str) -> Path:
    return run_dir / f".{FAILURE_FILE}.{service}"


def _last_step(run_dir: Path) -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        step = json.loads((run_dir / STATUS_FILE).read_text()).get("step")
        return step if isinstance(step, int) else None
    return None
