"""Why a run stopped, as `failure.json` in its directory: for the launcher, for scripts, and for whoever looks later.

A full disk must not take the reason with it: each service reserves the room for it when it starts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from asyncrl.telemetry.recorder import STATUS_FILE

logger = logging.getLogger(__name__)

FAILURE_FILE = "failure.json"
Kind = Literal["bad_state", "disk_full"]
_RESERVED_BYTES = 8192
_LONGEST_REASON = 1500
"""Characters; four bytes each and everything else fit into what is reserved."""
_FULL_TEXTS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "PytorchStreamWriter failed writing")
"""How libraries that write files without Python's help (safetensors, torch) say it."""


@dataclass(frozen=True)
class Failure:
    service: str
    kind: Kind
    reason: str
    time: float
    """Unix time."""
    step: int | None = None
    """Of the learner, as the run's status said last."""


def reserve(run_dir: Path, service: str) -> None:
    """Take the disk space that a reason needs, where there is a run directory; and forget this service's last one."""
    earlier = read_failure(run_dir)
    if earlier and earlier.service == service:
        clear_failure(run_dir)
    if run_dir.is_dir():
        _reserved(run_dir, service).write_bytes(b" " * _RESERVED_BYTES)


def release(run_dir: Path, service: str) -> None:
    """The service ends, and has nothing to say any more."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _reserved(run_dir, service).unlink()


def save_failure(run_dir: Path, service: str, reason: str, *, kind: Kind = "bad_state") -> Path | None:
    """Write `failure.json`, complete or not at all. What is there already stays: it came first, and may be the cause.

    None where nothing could be written; the log has the reason in any case.
    """
    target, reserved = run_dir / FAILURE_FILE, _reserved(run_dir, service)
    if target.exists():
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


def read_failure(run_dir: Path) -> Failure | None:
    """None if the run has not failed, or its file is not one of ours."""
    try:
        return Failure(**json.loads((run_dir / FAILURE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def clear_failure(run_dir: Path) -> None:
    """A run that starts, new or resumed, has not failed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        (run_dir / FAILURE_FILE).unlink()


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is that a disk or a quota has no room left."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(link, sqlite3.Error) and "database or disk is full" in str(link):
            return True
        if not isinstance(link, OSError) and any(text in str(link) for text in _FULL_TEXTS):
            return True
    return False


def describe_full_disk(error: BaseException, run_dir: Path) -> str:
    """The directory, its free space and the fix."""
    named = next((link.filename for link in _chain(error) if isinstance(link, OSError) and link.filename), None)
    folder = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else run_dir
    if not folder.is_dir():
        folder = run_dir
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    return (
        f"the disk of {folder} is full ({free / (1 << 20):,.1f} MiB free): {error}. "
        "Make room (old runs, trainer.save_limit) and continue with --resume"
    )


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
