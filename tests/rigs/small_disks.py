"""Small disks that one forked service alone sees: the kernel refuses to write more."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

NEW_USER, NEW_MOUNTS, PR_SET_PDEATHSIG = 0x1000_0000, 0x0002_0000, 1  # sched.h, prctl.h


def can_mount() -> bool:
    trial = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(trial, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="may not mount a small disk")


def small_disks(folder: Path, sizes: Mapping[str, str], kept: str = "") -> str:
    """A file for RUN_FIRST (tests/rigs/prefork.py) that mounts disks of these sizes on their folders. What is on the
    first disk when the service has ended is copied to `kept`."""
    file = folder / "small_disks_first.py"
    file.write_text(f"from tests.rigs.small_disks import mount\nmount({dict(sizes)}, {kept!r})\n")
    return str(file)


def mount(sizes: Mapping[str, str], kept: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: bytes | int) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}{arguments}")

    ids = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    call("unshare", NEW_USER | NEW_MOUNTS)
    for name, text in ids.items():
        Path("/proc/self", name).write_text(text)
    for place, size in sizes.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        call("mount", b"tmpfs", place.encode(), b"tmpfs", 0, f"size={size}".encode())
    if kept and (service := os.fork()):
        _, status = os.waitpid(service, 0)
        shutil.copytree(next(iter(sizes)), kept)
        os._exit(os.waitstatus_to_exitcode(status))
    if kept:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
