"""Check that a model which woke up gives the log-probs of a few fixed tokens that it gave before it slept.

Where we move the tensors ourselves each is compared bit for bit on the way (`asyncrl/devices/sleeping.py`); this asks
the model as a whole, through the path that samples or trains, and vLLM, which moves its own.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from asyncrl.errors import BadStateError

FIXED_TOKENS = 16
LARGEST_DIFFERENCE = {"cpu": 0.0, "cuda": 1e-2}
"""Tolerance in nats by device type. The bits of the weights are equal: a GPU library may only choose another kernel."""


def fixed_tokens(vocabulary: int, special: Collection[int]) -> np.ndarray:
    """[T] int32 ids spread over the vocabulary, none of them `special`."""
    ids = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.fromiter(special, np.int32))
    return ids[np.linspace(0, len(ids) - 1, FIXED_TOKENS).astype(int)]


def check_wake_parity(owner: str, before: torch.Tensor, after: torch.Tensor, device: torch.device) -> None:
    """Compare [T] log-probs from before and after a sleep. Raises BadStateError with the numbers on a mismatch."""
    difference = (before - after).abs()
    worst = int(difference.argmax())
    if not float(difference.max()) <= LARGEST_DIFFERENCE[device.type]:  # NaN is no parity, either
        raise BadStateError(
            f"{owner} is not what it was before it slept: the log-prob of fixed token {worst} was "
            f"{float(before[worst]):.6f} and is {float(after[worst]):.6f} (largest difference accepted on "
            f"{device.type}: {LARGEST_DIFFERENCE[device.type]:g})"
        )
