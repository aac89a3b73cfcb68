"""Settings of demonstrations and of the losses that learn from them: sections that exist only where their method is
chosen.

Schedules count policy versions: optimiser steps of the run, as long as one step publishes one version.
"""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from pydantic import Field

from asyncrl.config.sections import Section


class HintConfig(Section):
    """Hints: completions that begin with the first parts of their row's demonstration (UFT, arXiv 2505.16984)."""

    parts: int = Field(default=0, ge=0)
    """Most parts that a demonstration is cut into: at its sentences and lines, or between words where it has one
    sentence. A completion begins with the first j of L of them, j binomial. 0 gives no hints."""
    high: float = Field(default=0.95, ge=0, le=1)
    """Probability of each part in the first step."""
    low: float = Field(default=0.05, ge=0, le=1)
    """Probability of each part when hints end."""
    steps: int = Field(default=300, gt=0)
    """Steps in which the probability falls from high to low, along half a cosine; afterwards there are no hints."""

    def probability(self, version: int) -> float:
        """Probability of each part in the tickets of a policy version."""
        if version > self.steps:
            return 0.0
        return self.low + (self.high - self.low) * (1 + cos(pi * version / self.steps)) / 2


class DemonstrationConfig(Section):
    """`algorithm.demonstrations`: texts of `data.target_key` beside what the policy samples, for losses that learn from
    them."""

    rows: int = Field(default=0, ge=0)
    """Completions of a group that are its row's demonstration, out of batch.group_size. 0: none."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the groups that have such completions or hints, drawn by the run's seed."""
    hints: HintConfig = HintConfig()


class ChordConfig(Section):
    """`policy_loss: chord_mu` (arXiv 2508.11408): mu is the weight of the supervised part."""

    peak: float = Field(default=0.5, ge=0, le=1)
    """Largest mu."""
    valley: float = Field(default=0.02, ge=0, le=1)
    """mu after its fall."""
    warmup_steps: int = Field(default=200, ge=0)
    """Steps in which mu rises from 0 to its peak."""
    decay_steps: int = Field(default=400, ge=0)
    """Steps in which it then falls to its valley, along half a cosine."""
    weighting: Literal["none", "phi", "probability"] = "none"
    """Weight of a demonstration's token of probability p: 1, p (1 - p), or p."""

    def mu(self, version: int) -> float:
        """Weight of the supervised part in the step that a policy version is trained in."""
        if version < self.warmup_steps:
            return version / self.warmup_steps * self.peak
        since = version - self.warmup_steps
        if since >= self.decay_steps:
            return self.valley
        return self.valley + (self.peak - self.valley) * (1 + cos(pi * since / self.decay_steps)) / 2


class ChordPhiConfig(ChordConfig):
    """`policy_loss: chord_phi` (arXiv 2508.11408): chord_mu with weights p (1 - p) and a constant mu."""

    peak: float = Field(default=0.1, ge=0, le=1)
    """Largest mu."""
    valley: float = Field(default=0.1, ge=0, le=1)
    """mu after its fall."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which mu rises from 0 to its peak."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps in which it then falls to its valley, along half a cosine."""
    weighting: Literal["none", "phi", "probability"] = "phi"
    """Weight of a demonstration's token of probability p: 1, p (1 - p), or p."""


class LuffyConfig(Section):
    """`policy_loss: luffy` (arXiv 2504.14945)."""

    gamma: float = Field(default=0.1, gt=0)
    """Probability at which a demonstration's token has half of its reward."""


class UftConfig(Section):
    """`policy_loss: uft` (arXiv 2505.16984)."""

    coef: float = Field(default=1e-3, ge=0)
    """Weight of the hints' negative log-likelihood."""


class HptConfig(Section):
    """`policy_loss: hpt` (arXiv 2509.04419)."""

    coef: float = Field(default=1.0, ge=0)
    """Weight of the demonstration's loss."""


class SuccessGateConfig(Section):
    """`selections: [success_gate]`, by which hpt decides what a group learns from (arXiv 2509.04419)."""

    gate: float = Field(default=0.0, ge=0, lt=1)
    """A group learns from its demonstration alone where no more than this share of its completions is right."""
    success_score: float = 1.0
    """Score from which a trajectory is taken for right."""


class SrftConfig(Section):
    """`policy_loss: srft` (arXiv 2506.19767)."""

    supervised_coef: float = Field(default=0.5, ge=0)
    """Weight of the demonstrations' negative log-likelihood, before its factor exp(-entropy)."""
    right_coef: float = Field(default=0.1, ge=0)
    """Weight of right completions, before its factor exp(entropy)."""
    success_score: float = 1.0
    """Score from which a trajectory is taken for right."""
