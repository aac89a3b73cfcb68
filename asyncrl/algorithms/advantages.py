"""Advantage estimators that compare the trajectories of a group: one advantage for all tokens of a trajectory.

An estimator is `f(trajectories, config) -> Credit`. A score of NaN marks a row that could not be scored: it is left out
of every statistic. Groups of one scored row, and groups without spread, get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.trajectories import Credit, GroupStatistics, Trajectories, group_statistics
from asyncrl.config.algorithm import AlgorithmConfig

AdvantageEstimator = Callable[[Trajectories, AlgorithmConfig], Credit]

NO_SPREAD = 1e-6
"""Standard deviations below this are rounding: 0.1 + 0.1 + 0.1 has a mean that is not 0.1."""
EPSILON = 1e-6


def grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, over the group's standard deviation (GRPO, section 4.1.2).

    With `norm_adv_by_std=False`: s - mean (Dr. GRPO, arXiv 2503.20783).
    """
    return t.share(normalised(t.scores, t.group, config))


def dr_grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean (Dr. GRPO): no standard deviation, and a constant in place of the length."""
    g = group_statistics(t.scores, t.group)
    return t.share(with_spread(g, g.centred))


def rloo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score minus the mean of the others in the group: n/(n-1) (s - mean) (RLOO)."""
    g = group_statistics(t.scores, t.group)
    return t.share(with_spread(g, g.centred * g.count / (g.count - 1).clamp_min(1)))


def gdpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Each reward component normalised in its group before they are added up, so that rows of different components and
    the same sum stay different (GDPO)."""
    total = torch.zeros_like(t.scores)
    for name, component in t.components.items():
        g = group_statistics(component, t.group)
        total += t.component_weights.get(name, 1.0) * with_spread(g, g.centred / (g.std + 1e-4))
    of_batch = group_statistics(torch.where(t.scores.isnan(), torch.nan, total), torch.zeros_like(t.group))
    return t.share(with_spread(of_batch, of_batch.centred / (of_batch.std + 1e-4)))


def normalised(scores: torch.Tensor, group: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """Scores against their group's mean, over its standard deviation with `norm_adv_by_std`; 0 where it has one score
    or no spread. [B], [B] -> [B]"""
    g = group_statistics(scores, group)
    return with_spread(g, over_std(g, config))


def over_std(g: GroupStatistics, config: AlgorithmConfig) -> torch.Tensor:
    """Centred scores, over the group's standard deviation where the configuration says so."""
    return g.centred / (g.std + EPSILON) if config.norm_adv_by_std else g.centred


def with_spread(g: GroupStatistics, advantages: torch.Tensor) -> torch.Tensor:
    """The advantages where the group has spread, else 0."""
    return torch.where(has_spread(g), advantages, 0.0)


def has_spread(g: GroupStatistics) -> torch.Tensor:
    """[B] bool: scored rows whose group has more than one, and they differ."""
    return (g.count > 1) & (g.std >= NO_SPREAD)
