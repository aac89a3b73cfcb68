"""What a device has left, and how to get back what is only kept for reuse."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import torch

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Torch has a class of its own only for devices; the CPU's allocator and vLLM's processes say it in words."""
    said = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in said
        or "out of memory" in said
    )


def free_caches(device: torch.device) -> None:
    """Give back what is kept for reuse: Python's garbage, the device's pool, the C library's heap."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if _LIBC is not None and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """Of the device's memory; on the CPU of the machine's, or less where the process has a limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    if sys.platform == "linux":
        process = psutil.Process()
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        free = free if limit == psutil.RLIM_INFINITY else min(free, max(0, limit - process.memory_info().vms))
    return free
