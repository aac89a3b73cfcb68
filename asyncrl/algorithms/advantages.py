"""Advantage estimators: scores of trajectories -> one advantage each.

An estimator is `f(scores[B], groups[B], config) -> advantages[B]` in fp32. A score of NaN marks a row that could
not be scored: it is left out of every statistic and gets advantage 0. Groups of one scored row, and groups
without spread, get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.config.algorithm import AlgorithmConfig

AdvantageEstimator = Callable[[torch.Tensor, torch.Tensor, AlgorithmConfig], torch.Tensor]

NO_SPREAD = 1e-6
"""Standard deviations below this are rounding: 0.1 + 0.1 + 0.1 has a mean that is not 0.1."""
EPSILON = 1e-6


def grpo(scores: torch.Tensor, groups: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """(s - mean) / (std + 1e-6) within the group, std unbiased (GRPO, arXiv 2402.03300, section 4.1.2).

    With `norm_adv_by_std=False`: s - mean (Dr. GRPO, arXiv 2503.20783).
    """
    centred, std, count = _group_statistics(scores, groups)
    advantages = centred / (std + EPSILON) if config.norm_adv_by_std else centred
    return torch.where((count > 1) & (std >= NO_SPREAD), advantages, 0.0)


def rloo(scores: torch.Tensor, groups: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """Score minus the mean of the others in the group: n/(n-1) (s - mean) (RLOO, arXiv 2402.14740)."""
    centred, std, count = _group_statistics(scores, groups)
    return torch.where((count > 1) & (std >= NO_SPREAD), centred * count / (count - 1).clamp_min(1), 0.0)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {"grpo": grpo, "rloo": rloo}


def _group_statistics(scores: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row [B]: score minus its group's mean, the group's unbiased std, and how many of the group were scored.

    Unscored rows come out with centred 0 and count 0.
    """
    scored = ~scores.isnan()
    known = torch.where(scored, scores, 0.0).double()
    _, group = torch.unique(groups, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.float64)
    count = zeros.index_add(0, group, scored.double())
    mean = zeros.index_add(0, group, known) / count.clamp_min(1)
    centred = torch.where(scored, known - mean[group], 0.0)
    variance = zeros.index_add(0, group, centred**2) / (count - 1).clamp_min(1)
    rows_count = torch.where(scored, count[group], 0.0)
    return centred.float(), variance.sqrt()[group].float(), rows_count.float()
