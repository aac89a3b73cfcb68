"""The keys of the `algorithm` section, and what follows from them. `algorithm.AlgorithmConfig` also checks them against
each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field

from asyncrl.config.installed_methods import chosen_hooks, chosen_methods, methods, sections_of, with_defaults
from asyncrl.config.method import KINDS, Kind, Method
from asyncrl.config.method_settings import (
    CorrectionConfig,
    EntropyControlConfig,
    KlControlConfig,
    KlEstimator,
)
from asyncrl.config.sections import OpenSection, S, Section


class AlgorithmSettings(OpenSection):
    """All keys of the section, each valid by itself. A method's own settings stand in `algorithm.METHOD`, a section
    that exists only where the method is chosen."""

    adv_estimator: str = "grpo"
    """Name of a method (docs/algorithms.md, or a plug-in's page), `file.py:function` or `package.module:function`."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (False gives Dr. GRPO's advantage)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards to come, from token to token or from turn to turn, for estimators that give each its own
    advantage."""
    policy_loss: str = "ppo"
    """Name of a method (docs/algorithms.md, or a plug-in's page), `file.py:function` or `package.module:function`."""
    clip_ratio_low: float = Field(default=0.2, gt=0)
    """PPO clip range below 1."""
    clip_ratio_high: float = Field(default=0.28, gt=0)
    """PPO clip range above 1 (clip-higher)."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
    ] = "token-mean"
    """Aggregation of token losses to one number; denominators are those of the whole batch."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight in the loss of KL(policy || reference) per token. The reference policy is that of the `reference`
    section."""
    kl_reward_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) that is subtracted from each token's reward, and its sum from the trajectory's
    score. The KL is that of the policy at the start of the step."""
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
    """Any of them together, such as `[overlong, top_entropy]`: tokens that leave the loss because of what the whole
    batch looks like, decided before its first update. Names of methods, `file.py:function` or
    `package.module:function`."""
    filters: tuple[str, ...] = ()
    """Groups that no step takes, dropped as they are received: `[zero_variance]` is dynamic sampling. Another prompt
    takes the place of each; where trainer.max_steps is 0 the run ends with its epochs, after fewer steps. Names of
    methods, `file.py:function` or `package.module:function`."""
    replay_buffer_size: int = Field(default=0, ge=0)
    """Groups of earlier steps, the most spread first, that may be trained once more in the places of those that filters
    drop: SSB (arXiv 2504.16656). A group is drawn in proportion to mean |s - mean s| of its scores, where a step would
    else wait for another prompt, and only while no token of it is over learner.max_staleness. 0 is off; TRL has 64."""

    @classmethod
    def chosen_sections(cls, given: Mapping[str, Any]) -> Mapping[str, type[Section]]:
        """Sections of the methods that are chosen, or whose section is given where it alone chooses them."""
        return {name: each for method in chosen_methods(given) for name, each in sections_of(method).items()}

    @classmethod
    def possible_sections(cls) -> Mapping[str, type[Section]]:
        """Sections of all installed methods, those of the core first."""
        found = (sections_of(method) for kind in KINDS for method in methods(kind).values())
        return {name: each for sections in found for name, each in sections.items()}

    @classmethod
    def choice_of(cls, section: str, given: Mapping[str, Any]) -> str:
        kinds: Mapping[Kind, str] = {"advantage": "adv_estimator", "policy_loss": "policy_loss"}
        kinds = {**kinds, "selection": "selections", "group_filter": "filters"}
        said = []
        for kind, key in kinds.items():
            having = [name for name, method in methods(kind).items() if section in sections_of(method)]
            if having:
                now = with_defaults(given).get(key, cls.model_fields[key].default)
                sign = "=" if isinstance(now, str) else "+="
                said.append(f"algorithm.{key}{sign}{' or '.join(having)} (it is {now or 'empty'})")
        return ", or with ".join(said)

    @property
    def functions(self) -> tuple[tuple[str, str, Collection[str]], ...]:
        """Setting, value and installed names of each function that may be the user's own."""
        return (
            ("algorithm.adv_estimator", self.adv_estimator, methods("advantage")),
            ("algorithm.policy_loss", self.policy_loss, methods("policy_loss")),
            *(("algorithm.selections", name, methods("selection")) for name in self.selections),
            *(("algorithm.filters", name, methods("group_filter")) for name in self.filters),
        )

    @property
    def chosen_methods(self) -> tuple[Method, ...]:
        """The methods that are chosen, with the selection that the policy loss has tokens marked by. A user's own
        without a row is none."""
        named = ("adv_estimator", "policy_loss", "selections", "filters")
        return chosen_methods({**(self.model_extra or {}), **{name: getattr(self, name) for name in named}})

    @property
    def inserting_hooks(self) -> dict[str, int]:
        """Chosen ticket hooks that insert tokens, each with the trajectories of a group that it may insert whole."""
        hooks = chosen_hooks("ticket_hook", self)
        return {name: method.inserts(settings) for name, (method, settings) in hooks.items() if method.inserts}

    @property
    def entropy_control(self) -> EntropyControlConfig:
        return self._settings_or_off(EntropyControlConfig())

    def _settings_or_off(self, off: S) -> S:
        """The section of this class, or its defaults, which do nothing, where it is not there."""
        try:
            return self.settings_of(type(off))
        except LookupError:
            return off

    @property
    def needs(self) -> frozenset[str]:
        """Requirements of the chosen methods (asyncrl.config.method.NEEDS), and a reference where there is a KL
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
