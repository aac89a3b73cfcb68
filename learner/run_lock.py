"""One learner per run directory: two would train the same groups."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from asyncrl.errors import RunTakenError

LOCK_FILE = "learner.lock"


def lock_run(run_path: Path) -> int:
    """Hold the directory until the returned descriptor is closed or the process ends, however it ends."""
    run_path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise RunTakenError(
            f"another learner (process {owner}) works in {run_path}. Wait for its end, stop it, or set another run_dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor
