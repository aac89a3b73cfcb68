"""What a device has and can: memory by state, and its peak of floating-point operations."""

from __future__ import annotations

from math import nan

import psutil
import torch

from asyncrl.models.device_memory import free_bytes

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 FLOP/s by part of the device's name, longest first where one contains another (NVIDIA's data sheets)."""


def memory_by_state(device: torch.device) -> dict[str, int]:
    """Bytes. On a CPU what is allocated is what the process has resident, and nothing is reserved beyond it."""
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


def peak_flops(device: torch.device) -> float:
    """NaN for a device that is not in the table."""
    if device.type != "cuda":
        return nan
    name = torch.cuda.get_device_name(device)
    return next((PEAK_FLOPS[part] for part in sorted(PEAK_FLOPS, key=len, reverse=True) if part in name), nan)
