"""Off-policy correction: weights that turn samples of the behaviour policy into samples of the proximal one, and masks.

A weight is detached and multiplies its token's loss. A mask drops tokens or whole trajectories that are too far
off-policy to learn from; masks compose with each other and with any weight. A masked token has weight 0, takes no part
in the entropy bonus and the KL term either, and keeps its place in every denominator. Sequence-level weights are those
of the whole trajectory, given to each of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.ratios import (
    PolicyTokens,
    any_in_row,
    bound,
    geometric_ratio,
    row_mean,
    sequence_ratio,
)
from asyncrl.config.correction import CorrectionConfig, MaskConfig

NOTHING: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Correction:
    """Weights and masks of a micro-batch's tokens. All [N] and detached."""

    weights: torch.Tensor
    """Factors of the token losses; 0 where `masked`."""
    truncated: torch.Tensor
    """bool: the weight was cut to the cap."""
    masked: torch.Tensor
    """bool: the token takes no part in the loss."""
    masked_by: Mapping[str, torch.Tensor]
    """Masks [N] of the correction (under its kind), of each mask and of each selection; they may overlap."""


@torch.no_grad()
def correct(
    tokens: PolicyTokens, config: CorrectionConfig, selected: Mapping[str, torch.Tensor] = NOTHING
) -> Correction:
    """The weight of each token: that of `config.kind`, 0 where a selection or any of `config.masks` drops it.

    `selected` [N] bool each: what the selections drop, which look at the whole batch. With pi_proximal / pi_behaviour
    as token ratio, its product over the trajectory, or its geometric mean: `*_tis` is min(ratio, cap) (truncated
    importance sampling, as in decoupled PPO, arXiv 2505.24298), `*_mis` and `icepop` are the ratio within [lower,
    upper] and 0 elsewhere (IcePop: arXiv 2510.18855).
    Inserted tokens have weight 1, are never masked and take no part in their trajectory's ratio.
    """
    if tokens.provenance is not None and (inserted := tokens.provenance.is_inserted).any():
        sampled = ~inserted
        chosen = {name: dropped[sampled] for name, dropped in selected.items()}
        return _spread(correct(tokens.of_tokens(sampled), config, chosen), sampled)
    differences = tokens.proximal_logprobs - tokens.behaviour_logprobs
    weights, truncated, rejected = _weigh(differences, tokens.row, config)
    masked_by = {} if rejected is None else {config.kind: rejected}
    masked_by |= {mask.kind: _masked(mask, tokens, differences) for mask in config.masks} | dict(selected)
    masked = torch.zeros_like(truncated)
    for dropped in masked_by.values():
        masked = masked | dropped
    return Correction(torch.where(masked, 0.0, weights), truncated & ~masked, masked, masked_by)


def importance_weights(differences: torch.Tensor, row: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """[N] weights of `config.kind` alone, without masks: 0 out of its bounds. `differences` [N] of proximal and
    behaviour log-probs."""
    weights, _, rejected = _weigh(differences, row, config)
    return weights if rejected is None else torch.where(rejected, 0.0, weights)


def _spread(correction: Correction, sampled: torch.Tensor) -> Correction:
    """The correction of the sampled tokens, given to all: nothing happens to the others. [N] bool"""

    def everywhere(values: torch.Tensor, otherwise: float) -> torch.Tensor:
        spread = torch.full(sampled.shape, otherwise, dtype=values.dtype, device=values.device)
        spread[sampled] = values
        return spread

    return Correction(
        everywhere(correction.weights, 1),
        everywhere(correction.truncated, False),
        everywhere(correction.masked, False),
        {name: everywhere(dropped, False) for name, dropped in correction.masked_by.items()},
    )


def _weigh(
    differences: torch.Tensor, row: torch.Tensor, config: CorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return [N] weights, truncated tokens, and out-of-bounds tokens (None for kinds without bounds)."""
    nowhere = torch.zeros_like(row, dtype=torch.bool)
    if config.kind == "none":
        return torch.ones_like(differences), nowhere, None
    level, _, form = config.kind.partition("_")
    if level == "sequence":
        ratios = sequence_ratio(differences, row)
    elif level == "geometric":
        ratios = geometric_ratio(differences, row)
    else:
        ratios = bound(differences).exp()
    lower, upper = config.bounds
    if form == "tis":
        return ratios.clamp_max(upper), ratios > upper, None
    return ratios, nowhere, (ratios < lower) | (ratios > upper)


def _masked(mask: MaskConfig, tokens: PolicyTokens, differences: torch.Tensor) -> torch.Tensor:
    """Tokens dropped by one mask: [N] bool."""
    if mask.kind == "opsm":
        # Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): bad samples that the target policy has left.
        left = row_mean(tokens.behaviour_logprobs - tokens.logprobs.detach(), tokens.row) > mask.bounds[1]
        return left & (tokens.advantages < 0)
    lower, upper = mask.bounds
    if mask.kind == "dppo_tv":
        return total_variation_exceeded(tokens, lower, upper)
    if mask.kind == "veto":
        ratios = bound(differences).exp()
        return any_in_row((ratios < lower) | (ratios > upper), tokens.row)
    ratios = (sequence_ratio if mask.kind == "sequence" else geometric_ratio)(differences, tokens.row)
    return (ratios < lower) | (ratios > upper)


def total_variation_exceeded(tokens: PolicyTokens, lower: float, upper: float) -> torch.Tensor:
    """Tokens whose target probability has left [-lower, +upper] around the behaviour's, in the direction that the
    advantage asks for (DPPO-TV, arXiv 2602.04879): [N] bool."""
    moved = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
    return ((tokens.advantages > 0) & (moved > upper)) | ((tokens.advantages < 0) & (-moved > lower))
