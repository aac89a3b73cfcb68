"""Group filters: which groups never reach the learner's step, decided once, as each is received.

A filter is `f(group, config) -> str | None`: a short reason, by which the group is dropped and counted, or None. The
next prompt of the data takes its place; the filtered one is not sampled again before its next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.methods import ACCURACY, ZeroVarianceConfig
from protocol.messages import Prompt, TrajectoryRecord

SPREAD = 1e-6
"""Scores that differ by no more than this count as equal: means of 0.1, 0.1, 0.1 are not exactly 0.1."""


@dataclass(frozen=True)
class SampledGroup:
    """Group as a filter sees it. A greedy baseline and demonstrations are not in it."""

    prompt: Prompt
    """Row id, answer and the row's other columns among it."""
    trajectories: Sequence[TrajectoryRecord]
    lengths: Sequence[int]
    """Tokens of each trajectory."""
    accuracy: str = ""
    """Component of the reward that is reported as accuracy."""

    def scores(self, component: str = "") -> np.ndarray:
        """The reward, or a component of it, of the trajectories that have one. [n] float64

        `accuracy` is the component that is reported as accuracy, unless one has that very name.
        """
        if component == ACCURACY and not any(component in record.rewards for record in self.trajectories):
            component = self.accuracy
        scores = (record.rewards.get(component) if component else record.reward for record in self.trajectories)
        return np.asarray([score for score in scores if score is not None], float)


GroupFilter = Callable[[SampledGroup, AlgorithmConfig], str | None]


def zero_variance(group: SampledGroup, config: AlgorithmConfig) -> str | None:
    """Dynamic sampling (DAPO): drop a group whose scores are all equal, since its advantages are 0. Reasons: `unscored`
    for fewer than two scores, `zero_variance`, and `too_hard` or `too_easy` for a mean that is out of the bounds"""
    settings = config.settings_of(ZeroVarianceConfig)
    scores = group.scores(settings.component)
    if len(scores) < 2:
        return "unscored"
    if np.ptp(scores) <= SPREAD:
        return "zero_variance"
    if settings.low is not None and scores.mean() <= settings.low:
        return "too_hard"
    if settings.high is not None and scores.mean() >= settings.high:
        return "too_easy"
    return None
