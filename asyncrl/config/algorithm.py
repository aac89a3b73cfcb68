"""The `algorithm` section: estimator, loss, proximal policy, off-policy correction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from asyncrl.config.demonstrations import ChordConfig, DemonstrationConfig, HptConfig, SrftConfig
from asyncrl.config.methods import NEEDS, Method, method_of, methods
from asyncrl.config.sections import Section
from asyncrl.config.suggest import did_you_mean

Bounds = tuple[float, float]
KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k3_unbiased", "full"]

CAPS: Mapping[str, float] = {"token_tis": 2.0, "sequence_tis": 2.0, "geometric_tis": 2.0}
"""Default cap of each truncated kind."""
WEIGHT_BOUNDS: Mapping[str, Bounds] = {
    "token_mis": (0.5, 2.0),
    "sequence_mis": (0.5, 2.0),
    "geometric_mis": (0.99, 1.01),
    "icepop": (0.5, 5.0),
}
"""Default lower and upper bound of each masked kind."""
MASK_BOUNDS: Mapping[str, Bounds] = {
    "sequence": (0.5, 2.0),
    "geometric": (0.99, 1.01),
    "veto": (1e-4, float("inf")),
    "dppo_tv": (0.2, 0.2),
}
"""Default lower and upper bound of each mask that has them."""
MASK_THRESHOLDS: Mapping[str, float] = {"opsm": 0.5}
"""Default threshold of each mask that has one."""
TRAJECTORY_LEVELS = ("sequence", "geometric")
"""First words of the correction kinds that weigh a token by its whole trajectory."""
TRAJECTORY_MASKS = ("sequence", "geometric", "veto", "opsm")
"""Masks that look at all tokens of a trajectory."""


class MaskConfig(Section):
    """Tokens or whole trajectories that leave the loss (policy loss, entropy bonus and KL), on top of the weight."""

    kind: Literal["sequence", "geometric", "veto", "dppo_tv", "opsm"]
    """`sequence`, `geometric`: trajectories whose ratio pi_proximal / pi_behaviour (product or geometric mean of its
    tokens') is out of bounds. `veto`: trajectories with any token's ratio out of bounds. `dppo_tv`: tokens whose
    probability has already moved too far in the advantage's direction. `opsm`: trajectories of negative advantage whose
    mean log pi_behaviour / pi_target is above the threshold."""
    lower: float | None = Field(default=None, ge=0)
    """Smallest ratio that is kept; for dppo_tv the largest fall of a probability. Nothing means 0.5 (sequence), 0.99
    (geometric), 1e-4 (veto), 0.2 (dppo_tv)."""
    upper: float | None = Field(default=None, gt=0)
    """Largest ratio that is kept; for dppo_tv the largest rise of a probability. Nothing means 2 (sequence), 1.01
    (geometric), no bound (veto), 0.2 (dppo_tv)."""
    threshold: float | None = Field(default=None, gt=0)
    """Nothing means 0.5 (opsm)."""

    @property
    def bounds(self) -> Bounds:
        return _filled(self.lower, self.upper, MASK_BOUNDS[self.kind])

    @property
    def effective_threshold(self) -> float:
        return MASK_THRESHOLDS[self.kind] if self.threshold is None else self.threshold

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> MaskConfig:
        where = f"algorithm.correction.masks: the {self.kind} mask"
        if self.kind in MASK_BOUNDS:
            if self.threshold is not None:
                raise ValueError(f"{where} has no threshold. Set lower and upper instead")
            if self.kind != "dppo_tv":
                _check_bounds(where, self.bounds)
        elif self.lower is not None or self.upper is not None:
            raise ValueError(f"{where} has no lower and upper. Set threshold instead")
        return self


class CorrectionConfig(Section):
    """Off-policy correction: how pi_proximal / pi_behaviour weighs the policy loss.

    The ratio of a token, of its trajectory (the product), or the trajectory's geometric mean.
    """

    kind: Literal[
        "none",
        "token_tis",
        "sequence_tis",
        "geometric_tis",
        "token_mis",
        "sequence_mis",
        "geometric_mis",
        "icepop",
    ] = "token_tis"
    """`*_tis`: min(ratio, cap). `*_mis`, `icepop`: the ratio where it is within [lower, upper], else 0."""
    cap: float | None = Field(default=None, gt=0)
    """Largest weight of `*_tis`. Nothing means 2."""
    lower: float | None = Field(default=None, ge=0)
    """Smallest ratio that `*_mis` and icepop keep. Nothing means 0.5 (geometric_mis 0.99)."""
    upper: float | None = Field(default=None, gt=0)
    """Largest ratio that `*_mis` and icepop keep. Nothing means 2 (geometric_mis 1.01, icepop 5)."""
    masks: tuple[MaskConfig, ...] = ()
    """Any of them together, such as `[{kind: veto}, {kind: geometric, lower: 0.98}]`."""

    @property
    def trajectory_parts(self) -> list[str]:
        """The kind and the masks that are computed from whole trajectories, as `key value`."""
        parts = [f"algorithm.correction.kind {self.kind}"] if self.kind.startswith(TRAJECTORY_LEVELS) else []
        return parts + [f"the {mask.kind} mask" for mask in self.masks if mask.kind in TRAJECTORY_MASKS]

    @property
    def effective_cap(self) -> float:
        return CAPS[self.kind] if self.cap is None else self.cap

    @property
    def bounds(self) -> Bounds:
        return _filled(self.lower, self.upper, WEIGHT_BOUNDS[self.kind])

    def mask(self, kind: str) -> MaskConfig | None:
        return next((mask for mask in self.masks if mask.kind == kind), None)

    @model_validator(mode="after")
    def _makes_sense(self) -> CorrectionConfig:
        where = f"algorithm.correction.kind {self.kind}"
        if self.cap is not None and self.kind not in CAPS:
            fix = "Set algorithm.correction.upper instead" if self.kind in WEIGHT_BOUNDS else "Leave it out"
            raise ValueError(f"{where} has no cap (algorithm.correction.cap is {self.cap}). {fix}")
        if self.kind in WEIGHT_BOUNDS:
            _check_bounds(where, self.bounds)
        elif self.lower is not None or self.upper is not None:
            fix = "Set algorithm.correction.cap instead" if self.kind in CAPS else "Leave them out"
            raise ValueError(f"{where} has no lower and upper. {fix}")
        kinds = [mask.kind for mask in self.masks]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"algorithm.correction.masks names {', '.join(twice)} twice. Keep one")
        for level in ("sequence", "geometric"):
            if self.kind == f"{level}_mis" and level in kinds:
                raise ValueError(
                    f"{where} and the {level} mask both reject by the {level} ratio. Drop the mask, or set "
                    f"algorithm.correction.kind={level}_tis"
                )
        return self


class DppoConfig(Section):
    """`policy_loss: dppo` (arXiv 2602.04879)."""

    delta_low: float = Field(default=0.2, gt=0, le=1)
    """Largest fall of a token's probability below the behaviour's, if the advantage is negative."""
    delta_high: float = Field(default=0.2, gt=0, le=1)
    """Largest rise of a token's probability above the behaviour's, if the advantage is positive."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio of target and behaviour."""


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
    """Change of the coefficient by one step."""
    min: float = Field(default=0.0, ge=0)
    """Smallest coefficient."""
    max: float = Field(default=1.0, gt=0)
    """Largest coefficient."""


class SapoConfig(Section):
    """`policy_loss: sapo` (arXiv 2511.20347)."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate elsewhere."""


class CovarianceConfig(Section):
    """`policy_loss: clip_cov | kl_cov`, and the selections that they mark tokens by (arXiv 2505.22617)."""

    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of the batch's tokens that is marked, one at least."""
    lower: float = 1.0
    """Smallest covariance of advantage and log-prob that clip_cov may mark."""
    upper: float = 5.0
    """Largest one."""
    kl_coef: float = Field(default=1.0, ge=0)
    """Weight of kl_cov's penalty |log r|."""

    def number_of(self, tokens: int) -> int:
        """Tokens that are marked of a batch's."""
        return max(int(self.fraction * tokens), 1)


class PapoConfig(Section):
    """PAPO (arXiv 2507.06448): completions are to become less likely where parts of the images are black."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || policy with masked images) per token, which is made larger; 0 is off (in the paper 0.02,
    and 0.01 without a KL to a reference). Costs a second pass and its memory. Tokens of prompts without images have no
    such term. metrics.jsonl has the KL as `kl_prcp`: where it jumps, the loss is gamed."""
    entropy_coeff: float = Field(default=0.03, ge=0)
    """Weight of the entropies with images as they are and masked, which are made smaller: without it the KL grows by
    what the policy makes of masked images alone."""
    mask_ratio: float = Field(default=0.6, gt=0, le=1)
    """Probability of each square to be black."""
    patch_pixels: int = Field(default=14, gt=0)
    """Side of a square, in pixels of the image as it is given."""


class NoisyRolloutConfig(Section):
    """Trajectories that see distorted images and are trained on the clean ones (NoisyRollout, arXiv 2504.13055)."""

    rows: int = Field(default=0, ge=0)
    """Trajectories of each group that see the distorted images; 0 distorts none."""
    steps: int = Field(default=500, gt=0, le=1000)
    """Steps of forward diffusion, of 1,000, when the run begins."""
    schedule: Literal["sigmoid", "linear"] = "sigmoid"
    """How the steps fall to 0 over the run."""
    steepness: float = Field(default=30.0, gt=0)
    """Of the sigmoid."""
    midpoint: float = Field(default=2 / 3, ge=0, le=1)
    """Share of the run at which the sigmoid is a half."""


class AlgorithmConfig(Section):
    """Keys that are left out take the defaults of the chosen `adv_estimator` and `policy_loss`, where these have their
    own (docs/algorithms.md), and those below elsewhere."""

    adv_estimator: str = "grpo"
    """Name of a built-in (see asyncrl/algorithms/advantages.py) or `file.py:function` or `package.module:function`."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (False gives Dr. GRPO's advantage)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards to come, for estimators that give each token its own advantage."""
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
        """What the chosen methods need, of asyncrl.config.methods.NEEDS, and a KL to the reference."""
        needs = {need for method in self.chosen_methods for need in method.needs}
        needs |= {"reference"} if self.kl_loss_coef or self.kl_reward_coef else set()
        return frozenset(needs | ({"proximal"} if self.kl_reward_coef else set()))

    @property
    def loss_kl_estimator(self) -> KlEstimator:
        return self.kl_estimator or "k3"

    @property
    def reward_kl_estimator(self) -> KlEstimator:
        return self.kl_estimator or "k1"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_methods_defaults(cls, given: Any) -> Any:
        """The loss goes first: what it leaves open the estimator may say. An estimator may name the loss itself."""
        if not isinstance(given, dict):
            return given
        filled = dict(given)
        estimator = method_of("advantage", str(filled.get("adv_estimator", "grpo")))
        loss_name = filled.get("policy_loss") or (estimator.defaults.get("policy_loss") if estimator else None) or "ppo"
        loss = method_of("policy_loss", str(loss_name))
        for method in filter(None, (loss, estimator)):
            for key, value in method.defaults.items():
                filled[key] = _merged(value, filled[key]) if key in filled else value
        return filled

    @model_validator(mode="after")
    def _selections_and_filters_are_known(self) -> AlgorithmConfig:
        _check_names("algorithm.selections", self.selections, methods("selection"))
        _check_names("algorithm.filters", self.filters, methods("group_filter"))
        low, high = self.filter_low, self.filter_high
        if low is not None and high is not None and not low < high:
            raise ValueError(
                f"algorithm.filter_low ({low:g}) must be below algorithm.filter_high ({high:g}), or no group is left"
            )
        return self

    @model_validator(mode="after")
    def _kl_fits(self) -> AlgorithmConfig:
        if self.kl_loss_coef and self.kl_estimator == "k1":
            raise ValueError(
                f"algorithm.kl_estimator is k1 and algorithm.kl_loss_coef is {self.kl_loss_coef:g}: the gradient of k1 "
                "is that of log p, whose mean over samples is 0, so that it adds noise and no pull to the reference. "
                "Set algorithm.kl_estimator=k1+ (k1 with the gradient of the KL), k2 or k3, or use "
                "algorithm.kl_reward_coef instead"
            )
        if self.kl_reward_coef and self.kl_estimator == "k3_unbiased":
            raise ValueError(
                f"algorithm.kl_estimator is k3_unbiased and algorithm.kl_reward_coef is {self.kl_reward_coef:g}: its "
                "weight policy / behaviour corrects a gradient, and a reward has none. Set algorithm.kl_estimator=k1, "
                "or use algorithm.kl_loss_coef instead"
            )
        if self.kl_control.kind != "fixed" and not (self.kl_loss_coef or self.kl_reward_coef):
            raise ValueError(
                f"algorithm.kl_control.kind is {self.kl_control.kind}, but there is nothing to control: "
                "algorithm.kl_loss_coef and algorithm.kl_reward_coef are 0. Set one of them, or kind to fixed"
            )
        estimator = method_of("advantage", self.adv_estimator)
        if self.kl_reward_coef and estimator and estimator.plain_scores:
            raise ValueError(
                f"algorithm.kl_reward_coef is {self.kl_reward_coef:g}, but algorithm.adv_estimator {estimator.name} "
                f"reads scores as they were given ({estimator.formula}): nothing can be taken from them. Set "
                "algorithm.kl_loss_coef instead, or choose another estimator"
            )
        return self

    @model_validator(mode="after")
    def _demonstrations_fit(self) -> AlgorithmConfig:
        loss, used = method_of("policy_loss", self.policy_loss), self.demonstrations.are_used
        for method in self.chosen_methods:
            if "demonstrations" in method.needs and not used:
                raise ValueError(
                    f"{method.name} needs {NEEDS['demonstrations']}, and there are none. "
                    "Set algorithm.demonstrations.rows=1"
                )
        if used and (loss is None or "demonstrations" not in loss.needs):
            able = ", ".join(name for name, each in methods("policy_loss").items() if "demonstrations" in each.needs)
            raise ValueError(
                f"algorithm.demonstrations asks for demonstrations, which algorithm.policy_loss {self.policy_loss} "
                f"does not learn from. Choose one of {able}, or set algorithm.demonstrations.rows=0 and "
                "algorithm.demonstrations.hints.segments=0"
            )
        if used and "critic" in self.needs:
            raise ValueError(
                f"algorithm.adv_estimator {self.adv_estimator} needs {NEEDS['critic']}, which is not trained on "
                "demonstrations. Choose an estimator without one, such as grpo"
            )
        if self.demonstrations.rows and "zero_variance" in self.filters:
            raise ValueError(
                "algorithm.filters has zero_variance, which would drop the groups that have the most to learn from "
                "their demonstration: those without a right completion. Leave that filter out, or set "
                "algorithm.demonstrations.rows=0"
            )
        if self.kl_reward_coef and "success_gate" in self.selections:
            raise ValueError(
                f"algorithm.kl_reward_coef is {self.kl_reward_coef:g}, but the selection success_gate reads scores as "
                "they were given. Set algorithm.kl_loss_coef instead"
            )
        if loss and (missing := sorted({*loss.defaults.get("selections", ())} - {*self.selections})):
            raise ValueError(
                f"algorithm.policy_loss {loss.name} needs the selection {missing[0]}. Add it to algorithm.selections"
            )
        return self

    @model_validator(mode="after")
    def _proximal_fits(self) -> AlgorithmConfig:
        correction, kinds = self.correction, {mask.kind for mask in self.correction.masks}
        idle = sorted(kinds & {"sequence", "geometric", "veto"})
        if self.proximal == "behaviour" and (correction.kind != "none" or idle):
            raise ValueError(
                "algorithm.proximal is behaviour, so pi_proximal / pi_behaviour is 1 and these would do nothing: "
                f"algorithm.correction.kind {correction.kind}, masks {', '.join(idle) or 'none'}. "
                "Set algorithm.proximal=recompute, or algorithm.correction.kind=none without such masks"
            )
        askers = [(method.name, method.needs) for method in self.chosen_methods]
        askers += [("kl_reward_coef", self.needs & {"proximal"})] if self.kl_reward_coef else []
        for name, needs in askers if self.proximal != "recompute" else ():
            for need in sorted(needs & {"proximal", "entropies"}):
                raise ValueError(
                    f"{name} needs the {NEEDS[need]}, but algorithm.proximal is {self.proximal}. "
                    "Set algorithm.proximal=recompute"
                )
        if self.noisy_rollout.rows and self.proximal != "recompute":
            raise ValueError(
                f"algorithm.noisy_rollout.rows is {self.noisy_rollout.rows}, and algorithm.proximal {self.proximal} "
                "uses log-probs of the engine, which saw other images. Set algorithm.proximal=recompute"
            )
        loss = method_of("policy_loss", self.policy_loss)
        if loss and loss.weighs_behaviour and (correction.kind != "none" or "dppo_tv" in kinds):
            raise ValueError(
                f"algorithm.policy_loss {loss.name} already weighs by pi_target / pi_behaviour. "
                "Set algorithm.correction.kind=none and leave the dppo_tv mask out"
            )
        return self


def _check_names(setting: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"{setting} has {name!r}, which is no built-in.{did_you_mean(name, known)} Built-in are "
                f"{', '.join(known)}; your own is path/to/file.py:function or package.module:function"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{setting} has one twice: {', '.join(names)}. Keep one")


def _merged(default: Any, given: Any) -> Any:
    """A section's given keys over the default ones; anything else as it is given."""
    return {**default, **given} if isinstance(default, dict) and isinstance(given, dict) else given


def _filled(lower: float | None, upper: float | None, default: Bounds) -> Bounds:
    return (default[0] if lower is None else lower, default[1] if upper is None else upper)


def _check_bounds(where: str, bounds: Bounds) -> None:
    lower, upper = bounds
    if not lower < 1 < upper:
        raise ValueError(
            f"{where} keeps ratios within [{lower:g}, {upper:g}], which leaves out 1, the ratio of on-policy tokens. "
            "Set lower below 1 and upper above 1"
        )
