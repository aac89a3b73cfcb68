"""Devices by their configured name, and what they have: memory by state, room for more."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import psutil
import torch

from asyncrl.config.parts import ROLLOUT_WEIGHTS
from asyncrl.config.run_sections import AlignmentConfig, TrainerConfig
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.config.service_sections import LearnerConfig, RolloutConfig, meant_device, meant_dtype
from asyncrl.devices.gpu_assignment import GPUS_VARIABLE, listed_gpus
from asyncrl.errors import UserError
from asyncrl.model_files.folder import read_config, text_part

OLDEST_DRIVER = {12: 525, 13: 580}
"""First major version of NVIDIA's driver by CUDA's major version (CUDA Toolkit Release Notes, table "CUDA Toolkit and
Minimum Required Driver Version for CUDA Minor Version Compatibility")."""
SMI_DEADLINE_S = 30.0
LOGPROB_DIFFERENCE = {"bfloat16": 1.0, "float16": 0.125, "float32": 1e-3}
"""Accepted difference of a token's log-prob between engine and learner by model.dtype, in nats: several times what
rounding makes of it (docs/decisions/012)."""
TF32_LOGPROB_DIFFERENCE = 0.025
"""Limit for float32 with a GPU, where vLLM's attention in Triton multiplies float32 numbers in TF32."""
LEAST_BFLOAT16_WIDTH = 512
"""Hidden size from which a CPU's bfloat16 products save more than the conversions around them cost."""
MEAN_SHARE = 0.1
"""Share of the limit that the mean over tokens may have: a single rare token says little."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def resolve_device(name: str, setting: str = "device") -> torch.device:
    """The device that `setting`, such as learner.device, names here. Raises UserError if this machine has none, and
    where `auto` would mean the CPU of a machine that has a GPU."""
    device = torch.device(meant_device(name, cuda=torch.cuda.is_available()))
    if name != "cpu" and not torch.cuda.is_available() and (unseen := unseen_gpus()):
        reason, fix = unseen
        raise UserError(f"{setting} is {name}, but {reason}. {fix}, or set {setting}=cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{setting} is {name}, but torch {torch.__version__} sees no CUDA device. Set {setting}=cpu or auto"
        )
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise UserError(
            f"{setting} is {name}, but this machine has {torch.cuda.device_count()} CUDA device(s), numbered from 0. "
            f"Set {setting}=auto for the first"
        )
    return device


def gpu_bytes(learner_device: str, budget_gib: float = 0.0) -> int:
    """Memory of the GPU that learner.device means here, or its budget; 0 without one. May take CUDA's context."""
    if learner_device != "cpu" and budget_gib:
        return int(budget_gib * 2**30)
    name = meant_device(learner_device, cuda=torch.cuda.is_available())
    if name == "cpu" or not torch.cuda.is_available() or torch.device(name).index >= torch.cuda.device_count():
        return 0
    return torch.cuda.get_device_properties(name).total_memory


@cache
def unseen_gpus() -> tuple[str, str] | None:
    """The reason for which torch sees none of the GPUs that nvidia-smi shows, and the fix; None where it shows none, or
    CUDA_VISIBLE_DEVICES is there to hide them."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or (visible is not None and not listed_gpus(visible)):
        return None
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(
            command, capture_output=True, timeout=SMI_DEADLINE_S, check=True, encoding="utf-8", errors="replace"
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    gpu, _, driver = shown.partition("\n")[0].rpartition(", ")
    if not gpu:
        return None
    reason = f"nvidia-smi shows {gpu} (driver {driver}), and torch {torch.__version__} sees no device"
    built = torch.version.cuda
    if built is None:
        return f"{reason}: it is built without CUDA", "Remove .venv and run: DEVICE=cuda bash scripts/install.sh"
    oldest = OLDEST_DRIVER.get(int(built.partition(".")[0]), 0)
    number = driver.partition(".")[0]
    if number.isdigit() and int(number) < oldest:
        return f"{reason}: it is built for CUDA {built}, which needs driver {oldest} or newer", "Update the driver"
    return reason, "Look at dmesg whether the GPU hangs; in a container pass --gpus all"


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that the launcher assigned from, or else that this process sees: numbers, or UUIDs where the user has
    set CUDA_VISIBLE_DEVICES to such."""
    assigned, visible = os.environ.get(GPUS_VARIABLE), os.environ.get("CUDA_VISIBLE_DEVICES")
    if assigned is not None:
        return listed_gpus(assigned)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(map(str, range(count))) if visible is None else listed_gpus(visible)[:count]


def dtype_here(dtype: str, devices: Sequence[str]) -> str:
    """model.dtype as it is meant on this machine, for learner.device and rollout.device. A GPU older than Ampere has no
    bfloat16."""
    cuda = torch.cuda.is_available()
    if dtype == "auto" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32"
    return meant_dtype(dtype, devices, cuda=cuda)


def resolve_dtype(config: RunConfig) -> RunConfig:
    """Configuration with model.dtype as it is meant on this machine: on a CPU that multiplies bfloat16 numbers in its
    own instructions, `auto` is bfloat16 under adapters, which are float32, where products are long enough to gain."""
    devices = (config.learner.device, config.rollout.device)
    dtype = dtype_here(config.model.dtype, devices)
    may_round = config.model.dtype == "auto" and dtype == "float32" and config.model.lora.rank and _all_on_cpu(devices)
    if may_round and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        width = text_part(read_config(config.model)).get("hidden_size") or 0
        dtype = "bfloat16" if isinstance(width, int) and width >= LEAST_BFLOAT16_WIDTH else dtype
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _all_on_cpu(devices: Sequence[str]) -> bool:
    return {meant_device(name, cuda=torch.cuda.is_available()) for name in devices} == {"cpu"}


def max_logprob_difference(
    model: ModelConfig, learner: LearnerConfig, rollout: RolloutConfig, alignment: AlignmentConfig
) -> float:
    """Accepted difference of a token's log-prob between engine and learner, in nats, on this machine's devices."""
    if alignment.max_logprob_difference:
        return alignment.max_logprob_difference
    if (sampled := rollout.precision(model.quantization)) != model.quantization:
        rounded = filter(None, map(ROLLOUT_WEIGHTS.find, (sampled, model.quantization)))
        return max(weights.max_logprob_difference for weights in rounded)
    names = (learner.device, rollout.device)
    dtype = dtype_here(model.dtype, names)
    in_tf32 = dtype == "float32" and not _all_on_cpu(names)
    return TF32_LOGPROB_DIFFERENCE if in_tf32 else LOGPROB_DIFFERENCE[dtype]


def compute_in_full_float32() -> None:
    """Let float32 products be float32 ones: cuDNN's convolutions, of the vision tower, are in TF32 by torch's default.

    TF32 keeps 10 bits of a factor where float32 keeps 23; learner and engine would disagree by it. bfloat16 products
    are not concerned.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def check_device_channel(rollout: RolloutConfig, key: str, device: str) -> None:
    """Check one side of a channel between devices on its own machine; `key` is the setting that names its device."""
    channel = rollout.weights_channel
    if rollout.uses_device_channel and resolve_device(device, key).type != "cuda":
        raise UserError(
            f"rollout.weights_channel is {channel}, which needs a CUDA device on both sides, but {key} is {device} and "
            f"torch {torch.__version__} sees none here. Use a machine with a GPU, or set rollout.weights_channel=auto"
        )


def memory_by_state(device: torch.device) -> dict[str, int]:
    """Bytes by state. On a CPU what is allocated is what the process has resident, and nothing else is reserved."""
    if device.type != "cuda":
        resident = psutil.Process().memory_info().rss
        return {"allocated": resident, "reserved": resident, "free": free_bytes(device)}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "free": free_bytes(device),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def is_out_of_memory(error: BaseException) -> bool:
    """True for a full device or host. Only devices have an exception of their own; others are known by their text."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in text
        or "out of memory" in text
    )


def free_caches(device: torch.device) -> None:
    """Give back what is kept for reuse: Python's garbage, the device's pool, the C library's heap."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if _LIBC is not None and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def set_up_training(learner: LearnerConfig, trainer: TrainerConfig) -> None:
    """Threads, heap and seed of a process that trains."""
    if learner.cpu_threads:
        torch.set_num_threads(learner.cpu_threads)
    elif learner.num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // learner.num_processes))
    if trainer.mode == "async" and meant_device(learner.device, cuda=torch.cuda.is_available()) == "cpu":
        keep_freed_memory()
    torch.manual_seed(trainer.seed)


def keep_freed_memory() -> None:
    """Let the C library keep up to a GiB of what is freed, and all blocks below 32 MiB, for what is taken next.

    A training step on a CPU frees and takes the same memory again: given back in between, each of its pages costs a
    fault. Only glibc has these numbers (malloc.h); elsewhere nothing changes.
    """
    if _LIBC is not None and hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_TRIM_THRESHOLD, 1 << 30)
        _LIBC.mallopt(_MMAP_THRESHOLD, 32 << 20)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; on the CPU of the machine, or less where the process has a limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    if sys.platform == "linux":
        process = psutil.Process()
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        free = free if limit == psutil.RLIM_INFINITY else min(free, max(0, limit - process.memory_info().vms))
    return free
