"""Trajectories of a learner step as advantage estimators and selections see them, and the credit that they are given.

`B` rows are trajectories, those without a score and those that train nothing included. `N` runs over the trained tokens
of all rows, row after row; everything is detached fp32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Trajectories:
    """A batch before its first update. An estimator's `Needs` say which of the optional columns it gets."""

    scores: torch.Tensor
    """[B] sum of a row's rewards; NaN where it could not be scored: such a row takes part in no statistic."""
    group: torch.Tensor
    """[B] int64: rows of one prompt have one number."""
    row: torch.Tensor
    """[N] int64, ascending."""
    behaviour_logprobs: torch.Tensor
    """[N] as the engine reported them."""
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[B] each: what the reward functions said, by their names; NaN where a row could not be scored."""
    proximal_logprobs: torch.Tensor | None = None
    """[N] of the learner's policy at the start of the step."""

    @property
    def lengths(self) -> torch.Tensor:
        """[B] number of trained tokens."""
        return torch.bincount(self.row, minlength=len(self.scores))

    def share(self, rows: torch.Tensor) -> Credit:
        """Give every token of a row the row's advantage: [B] -> credit."""
        return Credit(rows[self.row])


@dataclass(frozen=True)
class Credit:
    """What an estimator answers."""

    advantages: torch.Tensor
    """[N]"""
    returns: torch.Tensor | None = None
    """[N] targets of the critic, where there is one."""


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its scored rows, [B] each; unscored rows have `centred` 0 and `count` 0."""

    centred: torch.Tensor
    """Score minus the group's mean."""
    std: torch.Tensor
    """Unbiased."""
    count: torch.Tensor
    """Number of scored rows."""


def group_statistics(scores: torch.Tensor, group: torch.Tensor) -> GroupStatistics:
    """Mean, standard deviation and size of groups, computed in fp64. [B], [B] -> [B] each"""
    scored = ~scores.isnan()
    known = torch.where(scored, scores, 0.0).double()
    _, place = torch.unique(group, return_inverse=True)
    zeros = torch.zeros(int(place.max()) + 1 if len(place) else 0, dtype=torch.float64)
    count = zeros.index_add(0, place, scored.double())
    mean = zeros.index_add(0, place, known) / count.clamp_min(1)
    centred = torch.where(scored, known - mean[place], 0.0)
    variance = zeros.index_add(0, place, centred**2) / (count - 1).clamp_min(1)
    rows_count = torch.where(scored, count[place], 0.0)
    return GroupStatistics(centred.float(), variance.sqrt()[place].float(), rows_count.float())
