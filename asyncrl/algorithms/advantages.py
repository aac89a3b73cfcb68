"""Advantage estimators: trajectories -> the credit of each trained token.

An estimator is `f(trajectories, config) -> Credit`. A score of NaN marks a row that could not be scored: it is left out
of every statistic. Groups of one scored row, and groups without spread, get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.registration import advantage
from asyncrl.algorithms.trajectories import Credit, Trajectories, group_statistics
from asyncrl.config.algorithm import AlgorithmConfig

AdvantageEstimator = Callable[[Trajectories, AlgorithmConfig], Credit]

NO_SPREAD = 1e-6
"""Standard deviations below this are rounding: 0.1 + 0.1 + 0.1 has a mean that is not 0.1."""
EPSILON = 1e-6


@advantage(formula="(s - mean_group) / (std_group + 1e-6)", paper="2402.03300")
def grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """(s - mean) / (std + 1e-6) within the group, std unbiased (GRPO, arXiv 2402.03300, section 4.1.2).

    With `norm_adv_by_std=False`: s - mean (Dr. GRPO, arXiv 2503.20783).
    """
    g = group_statistics(t.scores, t.group)
    advantages = g.centred / (g.std + EPSILON) if config.norm_adv_by_std else g.centred
    return t.share(torch.where((g.count > 1) & (g.std >= NO_SPREAD), advantages, 0.0))


@advantage(formula="s - mean of the others in the group", paper="2402.14740")
def rloo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score minus the mean of the others in the group: n/(n-1) (s - mean) (RLOO, arXiv 2402.14740)."""
    g = group_statistics(t.scores, t.group)
    advantages = g.centred * g.count / (g.count - 1).clamp_min(1)
    return t.share(torch.where((g.count > 1) & (g.std >= NO_SPREAD), advantages, 0.0))
