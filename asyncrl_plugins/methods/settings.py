"""Settings of the research methods: sections that exist only where their method is chosen."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.sections import Section


class GpgConfig(Section):
    """`adv_estimator: gpg` (arXiv 2504.02546)."""

    valid: Literal["spread", "nonzero_score"] = "spread"
    """Rows that count as having a gradient in the scale, all rows over these. `spread`: rows of groups whose scores
    differ, as in the paper. `nonzero_score`: rows whose score is not 0, as in RLLaVA and verl."""


class PassKConfig(Section):
    """`adv_estimator: passk_training` (arXiv 2508.10751)."""

    k: int = Field(default=4, gt=0)
    """Completions of a prompt of which one has to be right."""
    success_score: float = 1.0
    """Score from which a trajectory is taken for right."""


class GigpoConfig(Section):
    """`adv_estimator: gigpo` (arXiv 2505.10978)."""

    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of a turn's own advantage beside the trajectory's."""


class MtGrpoConfig(Section):
    """`adv_estimator: mt_grpo` (arXiv 2505.11821)."""

    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of a turn's own advantage beside the trajectory's."""


class SapoConfig(Section):
    """`policy_loss: sapo` (arXiv 2511.20347)."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate elsewhere."""


class KimiConfig(Section):
    """`policy_loss: kimi` (arXiv 2501.12599)."""

    tau: float = Field(default=0.1, ge=0)
    """Weight of the squared log-ratio."""


class KlCovConfig(Section):
    """`policy_loss: kl_cov` (arXiv 2505.22617)."""

    coef: float = Field(default=1.0, ge=0)
    """Weight of the penalty |log r| at the marked tokens."""


class CovarianceConfig(Section):
    """Share that both selections by covariance have (arXiv 2505.22617)."""

    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of the batch's tokens that is chosen, one at least."""

    def number_of(self, tokens: int) -> int:
        """Number of chosen tokens in a batch of so many."""
        return max(int(self.fraction * tokens), 1)


class TopCovarianceConfig(CovarianceConfig):
    """`selections: [top_covariance]`, by which kl_cov marks tokens."""


class RandomCovarianceConfig(CovarianceConfig):
    """`selections: [random_covariance]`, by which clip_cov marks tokens."""

    lower: float = 1.0
    """Smallest covariance of advantage and log-prob that may be chosen."""
    upper: float = 5.0
    """Largest covariance of advantage and log-prob that may be chosen."""


class CppoConfig(Section):
    """`selections: [cppo]` (arXiv 2503.22342)."""

    prune: float = Field(default=0.5, ge=0, lt=1)
    """Share of each group's trajectories that is not trained."""


class DppoConfig(Section):
    """`policy_loss: dppo` (arXiv 2602.04879)."""

    delta_low: float = Field(default=0.2, gt=0, le=1)
    """Largest fall of a token's probability below the behaviour's, if the advantage is negative."""
    delta_high: float = Field(default=0.2, gt=0, le=1)
    """Largest rise of a token's probability above the behaviour's, if the advantage is positive."""
    upper: float = Field(default=20.0, gt=1)
    """Largest weight target / behaviour of a token. Without a bound an unlikely token of negative advantage may weigh
    millions, as its probability hardly moves."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio of target and behaviour."""


class SsbConfig(Section):
    """`algorithm.ssb` (arXiv 2504.16656): groups of earlier steps in the places of those that filters drop."""

    size: int = Field(default=64, gt=0)
    """Most groups to draw from, those of the largest spread. A group is drawn in proportion to mean |s - mean s| of its
    scores, where a step would else wait for another prompt, and only while no token of it is over
    learner.max_staleness."""
