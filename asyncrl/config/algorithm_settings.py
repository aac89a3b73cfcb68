"""The keys of the `algorithm` section, and what follows from them. `algorithm.AlgorithmConfig` also checks them against
each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from asyncrl.config.correction import CorrectionConfig
from asyncrl.config.demonstrations import ChordConfig, DemonstrationConfig, HptConfig, SrftConfig
from asyncrl.config.method_settings import (
    CovarianceConfig,
    DppoConfig,
    EntropyControlConfig,
    GaeConfig,
    KlControlConfig,
    KlEstimator,
    NoisyRolloutConfig,
    PapoConfig,
    SapoConfig,
)
from asyncrl.config.methods import Method, method_of, methods
from asyncrl.config.sections import Section


class AlgorithmSettings(Section):
    """All keys of the section, each valid by itself."""

    adv_estimator: str = "grpo"
    """Name of a built-in (see asyncrl/algorithms/advantages.py) or `file.py:function` or `package.module:function`."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (False gives Dr. GRPO's advantage)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards to come, from token to token or from turn to turn, for estimators that give each its own
    advantage."""
    gpg_valid: Literal["spread", "nonzero_score"] = "spread"
    """Rows that count as having a gradient in the scale of `adv_estimator: gpg`, all rows over these. `spread`: rows of
    groups whose scores differ, as in the paper. `nonzero_score`: rows whose score is not 0, as in RLLaVA and verl."""
    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of a turn's own advantage beside the trajectory's in `adv_estimator: gigpo` and `mt_grpo`."""
    gae: GaeConfig = GaeConfig()
    pass_k: int = Field(default=4, gt=0)
    """k of `adv_estimator: passk_training`."""
    success_score: float = 1.0
    """Score from which `passk_training`, `hpt` and `srft` take a trajectory for right."""
    policy_loss: str = "ppo"
    """Name of a built-in (see asyncrl/algorithms/losses.py and hybrids.py) or `file.py:function` or
    `package.module:function`."""
    clip_ratio_low: float = Field(default=0.2, gt=0)
    """PPO clip range below 1."""
    clip_ratio_high: float = Field(default=0.28, gt=0)
    """PPO clip range above 1 (clip-higher)."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative."""
    dppo: DppoConfig = DppoConfig()
    sapo: SapoConfig = SapoConfig()
    kimi_tau: float = Field(default=0.1, ge=0)
    """Weight of the squared log-ratio of `policy_loss: kimi`."""
    covariance: CovarianceConfig = CovarianceConfig()
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    chord: ChordConfig = ChordConfig()
    luffy_gamma: float = Field(default=0.1, gt=0)
    """Probability at which `policy_loss: luffy` has half of its reward of a demonstration's token."""
    uft_coef: float = Field(default=1e-3, ge=0)
    """Weight of the hints' negative log-likelihood in `policy_loss: uft`."""
    hpt: HptConfig = HptConfig()
    srft: SrftConfig = SrftConfig()
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
    ] = "token-mean"
    """Aggregation of token losses to one number; denominators are those of the whole batch."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    papo: PapoConfig = PapoConfig()
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    noisy_rollout: NoisyRolloutConfig = NoisyRolloutConfig()
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight in the loss of KL(policy || reference) per token. The reference policy is that of the `reference`
    section."""
    kl_reward_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference), by the policy at the start of the step, which is taken from the reward of each
    token, and in sum from the trajectory's score."""
    kl_estimator: KlEstimator | None = None
    """Estimate of that KL from d = log policy - log reference at the sampled token. Nothing means `k3` in the loss and
    `k1` in the reward. `k1`: d, only in the reward. `k2`: d²/2. `k3`: exp(-d) + d - 1. `abs`: |d|. `k1+`, `k3+`: the
    value of k1 or k3 with the gradient of k2, which is the KL's. `k3_unbiased`: k3 weighted by policy / behaviour
    (DeepSeek-V3.2), only in the loss. `full`: the exact sum over the vocabulary, at the cost of a second pass."""
    kl_control: KlControlConfig = KlControlConfig()
    updates_per_batch: int = Field(default=1, gt=0)
    """Optimiser steps taken from one batch of groups."""
    proximal: Literal["recompute", "loglinear", "linear", "behaviour", "target"] = "recompute"
    """The policy that PPO clips around and that the correction weighs towards. `recompute`: the learner's at the start
    of the step, by a forward pass where one batch makes several updates. `loglinear`, `linear`: between the behaviour
    and the target policy by the age of each token, without that pass. `behaviour`: plain PPO on the engine's
    log-probs, without a correction. `target`: the policy being optimised, so that nothing is clipped (policy gradient
    with the correction's weights)."""
    correction: CorrectionConfig = CorrectionConfig()
    selections: tuple[str, ...] = ()
    """Any of them together, such as `[m2po, top_entropy]`: tokens that leave the loss because of what the whole batch
    looks like, decided before its first update. Names of built-ins (see asyncrl/algorithms/selections.py) or
    `file.py:function` or `package.module:function`."""
    m2po_threshold: float = Field(default=0.04, gt=0)
    """Largest mean squared log-ratio of proximal and behaviour policy that the selection m2po leaves."""
    top_entropy_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the batch's tokens, highest entropy first, that keep their policy loss under the selection
    top_entropy."""
    cppo_prune: float = Field(default=0.5, ge=0, lt=1)
    """Share of each group's trajectories that the selection cppo does not train."""
    filters: tuple[str, ...] = ()
    """Groups that no step takes, dropped as they are received: `[zero_variance]` is dynamic sampling. Another prompt
    takes the place of each; where trainer.max_steps is 0 the run ends with its epochs, after fewer steps. Names of
    built-ins (see asyncrl/algorithms/filters.py) or `file.py:function` or `package.module:function`."""
    filter_component: str = ""
    """Component of the reward that filters take for the score: its name, or `accuracy` for the one that is reported as
    accuracy (`reward.accuracy`); empty means the reward itself."""
    filter_low: float | None = None
    """The filter zero_variance drops groups whose mean score is not above this, too. Nothing means no bound."""
    filter_high: float | None = None
    """The filter zero_variance drops groups whose mean score is not below this, too. Nothing means no bound."""
    replay_buffer_size: int = Field(default=0, ge=0)
    """Groups of earlier steps, the most spread first, that may be trained once more in the places of those that filters
    drop: SSB (arXiv 2504.16656). A group is drawn in proportion to mean |s - mean s| of its scores, where a step would
    else wait for another prompt, and only while no token of it is over learner.max_staleness. 0 is off; TRL has 64."""

    @property
    def functions(self) -> tuple[tuple[str, str, Collection[str]], ...]:
        """Setting, value and names of the built-ins of each function that may be the user's own."""
        return (
            ("algorithm.adv_estimator", self.adv_estimator, methods("advantage")),
            ("algorithm.policy_loss", self.policy_loss, methods("policy_loss")),
            *(("algorithm.selections", name, methods("selection")) for name in self.selections),
            *(("algorithm.filters", name, methods("group_filter")) for name in self.filters),
        )

    @property
    def chosen_methods(self) -> tuple[Method, ...]:
        """The methods that are chosen, with the selection that the policy loss has tokens marked by. A user's own
        without a decorator is none."""
        loss = method_of("policy_loss", self.policy_loss)
        marks = [loss.marks] if loss and loss.marks else []
        selections = (method_of("selection", name) for name in dict.fromkeys((*self.selections, *marks)))
        filters = (method_of("group_filter", name) for name in self.filters)
        return tuple(filter(None, (method_of("advantage", self.adv_estimator), loss, *selections, *filters)))

    @property
    def needs(self) -> frozenset[str]:
        """Requirements of the chosen methods (asyncrl.config.methods.NEEDS), and a reference where there is a KL
        term."""
        needs = {need for method in self.chosen_methods for need in method.needs}
        needs |= {"reference"} if self.kl_loss_coef or self.kl_reward_coef else set()
        return frozenset(needs | ({"proximal"} if self.kl_reward_coef else set()))

    @property
    def loss_kl_estimator(self) -> KlEstimator:
        return self.kl_estimator or "k3"

    @property
    def reward_kl_estimator(self) -> KlEstimator:
        return self.kl_estimator or "k1"
