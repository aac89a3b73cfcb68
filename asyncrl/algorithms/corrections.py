"""Off-policy correction: weights that turn samples of the behaviour policy into samples of the proximal one.

A weight is detached and multiplies its token's loss; a masked token has weight 0 and keeps its place in every
denominator. Sequence-level weights are those of the whole trajectory, given to each of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.masks import masked_tokens
from asyncrl.algorithms.ratios import geometric_ratio, log_ratio, sequence_ratio
from asyncrl.algorithms.tokens import PolicyTokens
from asyncrl.config.algorithm import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    """All [N] and detached."""

    weights: torch.Tensor
    """Of the token losses; 0 where `masked`."""
    truncated: torch.Tensor
    """bool: the weight was cut to the cap."""
    masked: torch.Tensor
    """bool: the token takes no part in the policy loss."""
    masked_by: Mapping[str, torch.Tensor]
    """The same for the correction itself (under its kind) and each of its masks; they may overlap."""


@torch.no_grad()
def correct(tokens: PolicyTokens, config: CorrectionConfig, outliers: torch.Tensor | None = None) -> Correction:
    """The weight of each token: that of `config.kind`, 0 where any of `config.masks` drops it.

    `outliers` [N] bool: what `m2po` drops, decided over the whole batch. With pi_proximal / pi_behaviour as token
    ratio, its product over the trajectory, or its geometric mean: `*_tis` is min(ratio, cap) (truncated importance
    sampling, as in decoupled PPO, arXiv 2505.24298), `*_mis` and `icepop` are the ratio within [lower, upper] and 0
    elsewhere (IcePop: arXiv 2510.18855).
    """
    log_ratios = log_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    weights, truncated, rejected = _weigh(log_ratios, tokens.row, config)
    masked_by = {} if rejected is None else {config.kind: rejected}
    masked_by |= masked_tokens(tokens, log_ratios, config.masks, outliers)
    masked = torch.zeros_like(truncated)
    for dropped in masked_by.values():
        masked = masked | dropped
    return Correction(torch.where(masked, 0.0, weights), truncated & ~masked, masked, masked_by)


def _weigh(
    log_ratios: torch.Tensor, row: torch.Tensor, config: CorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[N] weights, which of them were truncated, and which are out of bounds (None where the kind has no bounds)."""
    nowhere = torch.zeros_like(row, dtype=torch.bool)
    if config.kind == "none":
        return torch.ones_like(log_ratios), nowhere, None
    level, _, form = config.kind.partition("_")
    if level == "sequence":
        ratios = sequence_ratio(log_ratios, row)
    elif level == "geometric":
        ratios = geometric_ratio(log_ratios, row)
    else:
        ratios = log_ratios.exp()
    if form == "tis":
        cap = config.effective_cap
        return ratios.clamp_max(cap), ratios > cap, None
    lower, upper = config.bounds
    return ratios, nowhere, (ratios < lower) | (ratios > upper)
