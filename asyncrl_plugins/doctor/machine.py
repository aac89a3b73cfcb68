"""Cores, memory, shared memory, disk and devices of this machine, or of the container around us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.checks.inputs import DRIVERS
from asyncrl.launch.processes import available_cores
from asyncrl.memory_plan import size
from asyncrl.telemetry.host_versions import installed_version
from asyncrl_plugins.doctor.findings import Finding, Findings
from protocol.endpoints import SHARED_MEMORY

SMALL_DISK = 10 * 2**30
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES_DEADLINE_S = 60.0
LIST_DEVICES = """
import json, os, torch
devices = []
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    devices.append({"name": torch.cuda.get_device_name(index), "total": total, "free": free})
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}), flush=True)
os._exit(0)  # torch is not taken apart
"""


def find_machine() -> Findings[None]:
    yield Finding("cores", f"{available_cores()} of {os.cpu_count()}")
    memory, limit = psutil.virtual_memory(), memory_limit()
    limited = f", limited to {size(limit)} (cgroup)" if limit and limit < memory.total else ""
    yield Finding("memory", f"{size(memory.total)}, {size(memory.available)} available{limited}")
    if SHARED_MEMORY.is_dir():
        room = shutil.disk_usage(SHARED_MEMORY)
        yield Finding("shared memory", f"{SHARED_MEMORY} has {size(room.free)} free of {size(room.total)}")
    else:
        value = f"there is no {SHARED_MEMORY}: weights are published in {tempfile.gettempdir()}"
        yield Finding("shared memory", value, "note")
    folders = (Path(tempfile.gettempdir()), Path.cwd())
    for folder in {folder.stat().st_dev: folder for folder in folders}.values():
        free = shutil.disk_usage(folder).free
        small = free < SMALL_DISK
        fix = "make room, or choose a run_dir on a larger disk" if small else ""
        yield Finding("disk", f"{size(free)} free in {folder}", "warning" if small else "ok", fix)


def memory_limit() -> int | None:
    """Bytes that a container may use."""
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


@dataclass(frozen=True)
class Device:
    name: str
    total: int
    """Bytes."""
    free: int


@contextmanager
def listed_devices() -> Iterator[subprocess.Popen[str] | None]:
    """A process that lists the CUDA devices, begun here and ended after: CUDA takes half a GiB of each device, which a
    trial needs. It imports torch while this process does. None where there is no driver, and so no device."""
    if not any(driver.exists() for driver in DRIVERS):
        yield None
        return
    command, pipe = [sys.executable, "-c", LIST_DEVICES], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, encoding="utf-8") as listing:
        try:
            yield listing
        finally:
            listing.kill()


def find_devices(listing: subprocess.Popen[str] | None) -> Findings[tuple[Device, ...]]:
    """The CUDA devices by index, as the process lists them."""
    try:
        facts = _listed(listing)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        last = str(error.stderr or error).strip().splitlines()[-1]
        fix = "look at nvidia-smi and dmesg whether a GPU or its driver hangs, else: bash scripts/install.sh"
        yield Finding("devices", f"torch cannot look at them: {last}", "problem", fix)
        return ()
    built = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    devices = tuple(Device(**device) for device in facts["devices"])
    for index, device in enumerate(devices):
        yield Finding(f"cuda:{index}", f"{device.name}, {size(device.total)}, {size(device.free)} free")
    if DRIVER.is_file():
        yield Finding("nvidia driver", DRIVER.read_text(encoding="utf-8").splitlines()[0].strip())
    if devices:
        yield from _find_compiler()
        return devices
    from asyncrl.devices.device import unseen_gpus  # imports torch

    if unseen := unseen_gpus():
        yield Finding("devices", unseen[0], "problem", unseen[1])
    elif DRIVER.is_file():
        value = f"there is an NVIDIA driver, but torch {facts['torch']} (built {built}) sees no device"
        fix = "install a build of torch for the driver (bash scripts/install.sh), and in a container pass --gpus all"
        yield Finding("devices", value, "problem", fix)
    else:
        yield Finding("devices", f"the CPU alone; torch {facts['torch']} is built {built}", "note")
    return devices


def _listed(listing: subprocess.Popen[str] | None) -> dict[str, Any]:
    if listing is None:
        import torch

        return {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": []}
    listed, complaint = listing.communicate(timeout=DEVICES_DEADLINE_S)
    if listing.returncode:
        raise subprocess.CalledProcessError(listing.returncode, "python", listed, complaint)
    return json.loads(listed.splitlines()[-1])


def _find_compiler() -> Findings[None]:
    """Look for what Triton builds the launcher of each kernel with (triton/runtime/build.py). Nothing is found where
    both are there."""
    chosen, missing = os.environ.get("CC"), list[str]()
    if not any(shutil.which(name) for name in ([chosen] if chosen else ["gcc", "clang"])):
        missing.append("C compiler (gcc, clang or what CC names)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        missing.append(f"header of Python ({header})")
    if missing:
        lacking = " and no ".join(missing)
        value = f"there is no {lacking}: Triton cannot build its kernels, which vLLM needs on a GPU"
        fix = "install them: apt-get install gcc libc6-dev python3-dev, or what your system calls these"
        yield Finding("compiler", value, "problem" if installed_version("vllm") else "warning", fix)
