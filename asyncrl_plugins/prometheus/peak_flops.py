"""Peak of a device's operations, of which `mfu` is a share."""

from __future__ import annotations

from math import nan

import torch

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


def peak_flops(device: torch.device) -> float:
    """NaN for a device that is not in the table."""
    if device.type != "cuda":
        return nan
    name = torch.cuda.get_device_name(device)
    return next((PEAK_FLOPS[part] for part in sorted(PEAK_FLOPS, key=len, reverse=True) if part in name), nan)
