"""Demonstrations in reinforcement learning: the tickets that have any, for policy losses that learn from them.

Schedules count policy versions: optimiser steps of the run, as long as one step publishes one version.
"""

from __future__ import annotations

from math import cos, pi

from pydantic import Field

from asyncrl.config.sections import Section


class HintConfig(Section):
    """Hints: completions that begin with the first segments of their row's demonstration (UFT, arXiv 2505.16984)."""

    segments: int = Field(default=0, ge=0)
    """Most segments that a demonstration is cut into: at its sentences and lines, or between words where it has one
    sentence. A completion begins with the first j of L of them, j binomial. 0 gives no hints."""
    high: float = Field(default=0.95, ge=0, le=1)
    """Probability of each segment in the first step."""
    low: float = Field(default=0.05, ge=0, le=1)
    """Probability of each segment when hints end."""
    steps: int = Field(default=300, gt=0)
    """Steps in which the probability falls from high to low, along half a cosine; afterwards there are no hints."""

    def probability(self, version: int) -> float:
        """Probability of each segment in the tickets of a policy version."""
        if version > self.steps:
            return 0.0
        return self.low + (self.high - self.low) * (1 + cos(pi * version / self.steps)) / 2


class DemonstrationConfig(Section):
    """Demonstrations of `data.target_key` beside what the policy samples, for policy losses that learn from them."""

    rows: int = Field(default=0, ge=0)
    """Completions of a group that are its row's demonstration, out of batch.group_size. 0: none."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the groups that have such completions or hints, drawn by the run's seed."""
    hints: HintConfig = HintConfig()

    @property
    def are_used(self) -> bool:
        return self.rows > 0 or self.hints.segments > 0
