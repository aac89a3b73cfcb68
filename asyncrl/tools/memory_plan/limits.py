"""Sizes that bound the device's memory: the engine keeps to them, and the plan counts with them."""

from __future__ import annotations

PREFILL_TOKENS = 16_384
"""Most padded prompt tokens that the hf engine admits in one forward pass (a single prompt may be longer)."""
NCCL_BYTES = 1 << 29
"""What NCCL takes for itself on each device, generously."""
