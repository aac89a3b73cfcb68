"""Settings of single methods of the core: sections that exist only where their method is chosen."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.sections import Section

KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k3_unbiased", "full"]


class GaeConfig(Section):
    """`adv_estimator: gae` (arXiv 1506.02438)."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the policy's advantages."""
    critic_lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the critic's targets (VC-PPO, arXiv 2503.01491)."""
    length_alpha: float = Field(default=0.0, ge=0)
    """Above 0 the policy's lambda is 1 - 1 / (length_alpha * length), not `lam` (VAPO, arXiv 2504.05118: 0.05)."""
    whiten: bool = True
    """Give the advantages of a batch mean 0 and variance 1."""


class GigpoConfig(Section):
    """`adv_estimator: gigpo` (arXiv 2505.10978)."""

    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of a turn's own advantage beside the trajectory's."""


class DppoConfig(Section):
    """`policy_loss: dppo` (arXiv 2602.04879)."""

    delta_low: float = Field(default=0.2, gt=0, le=1)
    """Largest fall of a token's probability below the behaviour's, if the advantage is negative."""
    delta_high: float = Field(default=0.2, gt=0, le=1)
    """Largest rise of a token's probability above the behaviour's, if the advantage is positive."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio of target and behaviour."""


class SapoConfig(Section):
    """`policy_loss: sapo` (arXiv 2511.20347)."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate elsewhere."""


class M2poConfig(Section):
    """`selections: [m2po]` (arXiv 2510.01161)."""

    threshold: float = Field(default=0.04, gt=0)
    """Largest mean squared log-ratio of proximal and behaviour policy that is left."""


class TopEntropyConfig(Section):
    """`selections: [top_entropy]` (arXiv 2506.01939)."""

    fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the batch's tokens, highest entropy first, that keep their policy loss."""


class ZeroVarianceConfig(Section):
    """`filters: [zero_variance]` (DAPO's dynamic sampling, arXiv 2503.14476)."""

    component: str = ""
    """Component of the reward that is taken for the score: its name, or `accuracy` for the one that is reported as
    accuracy (`reward.accuracy`); empty means the reward itself."""
    low: float | None = None
    """Groups whose mean score is not above this are dropped, too. Nothing means no bound."""
    high: float | None = None
    """Groups whose mean score is not below this are dropped, too. Nothing means no bound."""

    @model_validator(mode="after")
    def _leaves_a_group(self) -> ZeroVarianceConfig:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(
                f"algorithm.zero_variance.low ({self.low:g}) must be below algorithm.zero_variance.high "
                f"({self.high:g}), or no group is left"
            )
        return self


class KlControlConfig(Section):
    """Movement of `algorithm.kl_loss_coef` and `algorithm.kl_reward_coef` during the run."""

    kind: Literal["fixed", "adaptive", "linear"] = "fixed"
    """`adaptive`: after each step the coefficients grow or shrink by at most 0.2 * trajectories / horizon, towards a KL
    of `target`. `linear`: they fall to 0 over the steps of the run."""
    target: float = Field(default=0.1, gt=0)
    """KL in nats per token, a mean over trajectories."""
    horizon: int = Field(default=10000, gt=0)
    """Trajectories over which `adaptive` moves the coefficients."""


class EntropyControlConfig(Section):
    """Adaptive `algorithm.entropy_coeff` (arXiv 2505.22312)."""

    target: float = Field(default=0.0, ge=0)
    """Entropy in nats per token. After a step at or below it the coefficient grows and the next step has the bonus;
    after any other step the coefficient falls and there is no bonus. 0 is off: the coefficient is fixed."""
    delta: float = Field(default=0.005, gt=0)
    """Change of the coefficient by one step, within 0 and 1."""
