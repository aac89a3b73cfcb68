"""Importance ratios of tokens, of whole trajectories, and their geometric means: never infinite."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios, and their sums over a trajectory, are clamped here before `exp`, so that no weight is infinite."""


def log_ratio(numerator_logprobs: torch.Tensor, denominator_logprobs: torch.Tensor) -> torch.Tensor:
    """numerator - denominator, clamped to +-20. [N], [N] -> [N]"""
    return (numerator_logprobs - denominator_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(numerator_logprobs: torch.Tensor, denominator_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator), the log clamped to +-20. [N], [N] -> [N]"""
    return log_ratio(numerator_logprobs, denominator_logprobs).exp()


def sequence_ratio(log_ratios: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Product of the token ratios of each token's trajectory, its log clamped to +-20. [N], [N] -> [N]

    Correct only where all trainable tokens of a trajectory are present; packing never splits one.
    """
    total, _ = _sums(log_ratios, row)
    return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().to(log_ratios.dtype)


def geometric_ratio(log_ratios: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Geometric mean of the token ratios of each token's trajectory. [N], [N] -> [N]"""
    return row_mean(log_ratios, row).exp()


def row_mean(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Mean over each token's trajectory. [N], [N] -> [N]"""
    total, count = _sums(values, row)
    return (total / count).to(values.dtype)


def any_in_row(condition: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Whether the condition holds for any token of each token's trajectory. [N] bool, [N] -> [N] bool"""
    total, _ = _sums(condition.float(), row)
    return total > 0


def _sums(values: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of each token's trajectory and its number of tokens, fp64 [N]."""
    _, index, counts = torch.unique(row, return_inverse=True, return_counts=True)
    totals = torch.zeros(len(counts), dtype=torch.float64, device=values.device)
    return totals.index_add(0, index, values.double())[index], counts[index].double()
