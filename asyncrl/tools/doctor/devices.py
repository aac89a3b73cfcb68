"""The devices, seen by a process of its own: asking CUDA takes half a GiB of each, which a trial is to have."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.tools.doctor.findings import Finding, Findings, size

DRIVER = Path("/proc/driver/nvidia/version")
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Device:
    name: str
    total: int
    """Bytes."""
    free: int


def find_devices() -> Findings[tuple[Device, ...]]:
    """The CUDA devices by index."""
    command = [sys.executable, "-m", "asyncrl.tools.doctor.devices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        value = f"CUDA did not answer within {DEADLINE_S:g} s"
        yield Finding("devices", value, "problem", "look at nvidia-smi and dmesg: a GPU or its driver hangs")
        return ()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("devices", f"torch cannot look at them: {last}", "problem", "bash scripts/install.sh")
        return ()
    facts = json.loads(done.stdout.splitlines()[-1])
    built = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    devices = tuple(Device(**device) for device in facts["devices"])
    if DRIVER.is_file():
        yield Finding("nvidia driver", DRIVER.read_text().splitlines()[0].strip())
    for index, device in enumerate(devices):
        yield Finding(f"cuda:{index}", f"{device.name}, {size(device.total)}, {size(device.free)} free")
    if not devices and DRIVER.is_file():
        value = f"there is an NVIDIA driver, but torch {facts['torch']} (built {built}) sees no device"
        fix = "install a build of torch for the driver (bash scripts/install.sh), and in a container pass --gpus all"
        yield Finding("devices", value, "problem", fix)
    elif not devices:
        yield Finding("devices", f"the CPU alone; torch {facts['torch']} is built {built}", "note")
    return devices


def _look() -> None:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append({"name": torch.cuda.get_device_name(index), "total": total, "free": free})
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}))


if __name__ == "__main__":
    _look()
