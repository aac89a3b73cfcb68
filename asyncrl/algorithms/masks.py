"""Masks: tokens and whole trajectories that are too far off-policy to learn from.

They compose with each other and with any weight. A masked token keeps its place in every denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.algorithms.ratios import any_in_row, geometric_ratio, row_mean, sequence_ratio
from asyncrl.algorithms.tokens import PolicyTokens
from asyncrl.config.algorithm import MaskConfig


def masked_tokens(
    tokens: PolicyTokens, log_ratios: torch.Tensor, masks: Sequence[MaskConfig], outliers: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """What each mask drops: its kind -> [N] bool.

    `log_ratios` [N]: log of pi_proximal / pi_behaviour, clamped. `outliers` [N]: what `m2po` drops.
    """
    return {mask.kind: _dropped(mask, tokens, log_ratios, outliers) for mask in masks}


def _dropped(
    mask: MaskConfig, tokens: PolicyTokens, log_ratios: torch.Tensor, outliers: torch.Tensor | None
) -> torch.Tensor:
    if mask.kind == "m2po":
        if outliers is None:
            raise ValueError("m2po is decided over the whole batch: call m2po_outliers first")
        return outliers
    if mask.kind == "opsm":
        # Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): bad samples that the target policy has left.
        left = row_mean(tokens.behaviour_logprobs - tokens.logprobs.detach(), tokens.row) > mask.effective_threshold
        return left & (tokens.advantages < 0)
    lower, upper = mask.bounds
    if mask.kind == "dppo_tv":
        return total_variation_exceeded(tokens, lower, upper)
    if mask.kind == "veto":
        ratios = log_ratios.exp()
        return any_in_row((ratios < lower) | (ratios > upper), tokens.row)
    ratios = (sequence_ratio if mask.kind == "sequence" else geometric_ratio)(log_ratios, tokens.row)
    return (ratios < lower) | (ratios > upper)


def total_variation_exceeded(tokens: PolicyTokens, lower: float, upper: float) -> torch.Tensor:
    """[N] bool: the target's probability has already moved, in the direction that the advantage asks for, by more
    than `upper` above or `lower` below the behaviour's (DPPO-TV, arXiv 2602.04879)."""
    moved = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
    return ((tokens.advantages > 0) & (moved > upper)) | ((tokens.advantages < 0) & (-moved > lower))


def m2po_outliers(proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, threshold: float) -> torch.Tensor:
    """[N] bool over all trainable tokens of a batch: the fewest tokens, largest squared log-ratio first, without
    which the mean squared log-ratio is below the threshold (M2PO, arXiv 2510.01161). One token always stays.
    """
    squares = (proximal_logprobs - behaviour_logprobs).double() ** 2
    ascending, order = torch.sort(squares, stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = max(int((means < threshold).sum()), 1)  # the running mean of ascending values never falls
    outliers = torch.zeros_like(squares, dtype=torch.bool)
    outliers[order[kept:]] = True
    return outliers
