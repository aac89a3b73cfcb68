"""The critic's loss (PPO, arXiv 1707.06347, and its implementation's clip of the value)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ValueLoss:
    token_loss: torch.Tensor
    """[n]"""
    clipped: torch.Tensor
    """[n] bool: the clip decided."""


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float) -> ValueLoss:
    """Half the squared error, the larger of plain and clipped: values that have left [old - clip_range, old +
    clip_range] on the way to their return get no gradient. [n] each; a clip_range of 0 clips nothing."""
    plain = (values - returns) ** 2
    if not clip_range:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    near = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns) ** 2
    return ValueLoss(0.5 * torch.maximum(plain, near), near > plain)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one. NaN where returns are
    equal or there are less than two."""
    if len(returns) < 2:
        return float("nan")
    variance = returns.double().var()
    return float(1 - (returns.double() - values.double()).var() / variance) if variance > 0 else float("nan")
