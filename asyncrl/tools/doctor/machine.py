"""Cores, memory, shared memory and disk of this machine, or of the container around us."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from asyncrl.launch.processes import available_cores
from asyncrl.tools.doctor.findings import Finding, Findings, size
from protocol.endpoints import SHARED_MEMORY

SMALL_SHARED_MEMORY = 2**30
SMALL_DISK = 10 * 2**30
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""A limit above is none."""


def find_machine() -> Findings[None]:
    import psutil

    yield Finding("cores", f"{available_cores()} of {os.cpu_count()}")
    memory = psutil.virtual_memory()
    limit = memory_limit()
    limited = f", limited to {size(limit)} (cgroup)" if limit and limit < memory.total else ""
    yield Finding("memory", f"{size(memory.total)}, {size(memory.available)} available{limited}")
    yield _shared_memory()
    folders = (Path(tempfile.gettempdir()), Path.cwd())
    for folder in {folder.stat().st_dev: folder for folder in folders}.values():
        free = shutil.disk_usage(folder).free
        small = free < SMALL_DISK
        fix = "make room, or choose a run_dir on a larger disk" if small else ""
        yield Finding("disk", f"{size(free)} free in {folder}", "warning" if small else "ok", fix)


def _shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        value = f"there is no {SHARED_MEMORY}: weights are published in {tempfile.gettempdir()}"
        return Finding("shared memory", value, "note")
    room = shutil.disk_usage(SHARED_MEMORY)
    value = f"{SHARED_MEMORY} has {size(room.free)} free of {size(room.total)}"
    if room.free >= SMALL_SHARED_MEMORY:
        return Finding("shared memory", value)
    value += ", and three versions of the published weights go there"
    return Finding("shared memory", value, "warning", shared_memory_fix("8g"))


def shared_memory_fix(amount: str) -> str:
    return (
        f"in a container set --shm-size={amount} (compose: ASYNCRL_SHM_SIZE={amount}), else "
        f"mount -o remount,size={amount} {SHARED_MEMORY}"
    )


def usable_memory() -> int:
    """Bytes that a run may take of the host now."""
    import psutil

    available = psutil.virtual_memory().available
    return min(available, memory_limit() or available)


def memory_limit() -> int | None:
    """Of a container, in bytes."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None
