"""The `algorithm` section: its keys, defaults of the chosen methods, and which keys fit each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from asyncrl.config.correction import CorrectionConfig
from asyncrl.config.installed_methods import chosen_hooks, chosen_methods, method_of, methods, with_defaults
from asyncrl.config.method import CHOICE_KEYS, KINDS, NEEDS, Kind, Method
from asyncrl.config.methods import EntropyControlConfig
from asyncrl.config.sections import OpenSection, Section, names_in
from asyncrl.user_functions import what_it_may_be

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k3_unbiased", "full"]


class KlControlConfig(Section):
    """Movement of `algorithm.kl_loss_coef` and `algorithm.kl_reward_coef` during the run."""

    kind: Literal["fixed", "adaptive", "linear"] = "fixed"
    """`adaptive`: after each step the coefficients grow or shrink by at most 0.2 * trajectories / horizon, towards a KL
    of `target`. `linear`: they fall to 0 over the steps of the run."""
    target: float = Field(default=0.1, gt=0)
    """KL in nats per token, a mean over trajectories."""
    horizon: int = Field(default=10000, gt=0)
    """Trajectories over which `adaptive` moves the coefficients."""


class AlgorithmConfig(OpenSection):
    """Keys that are left out take the defaults of the chosen `adv_estimator` and `policy_loss`, where these have their
    own (docs/algorithms.md), and those below elsewhere. A method's own settings stand in a section of its name, such as
    `algorithm.gae`, which exists only where the method is chosen."""

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
    loss_agg_mode: Aggregation = "token-mean"
    """Aggregation of token losses to one number; denominators are those of the whole batch."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_agg_mode: Aggregation = "token-mean"
    """Aggregation of the sampled tokens' entropies to that bonus, whatever the loss's is: a mean over tokens as in TRL
    and RLLaVA, while verl and ROLL take the loss's. A sum over a completion's tokens grows with its length."""
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

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_methods_defaults(cls, given: Any) -> Any:
        return with_defaults(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _keys_fit(self) -> AlgorithmConfig:
        rules = (selection_problems, kl_problems, insertion_problems, proximal_problems, source_problems)
        problems = [problem for rule in rules for problem in rule(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def chosen_sections(cls, given: Mapping[str, Any]) -> Mapping[str, type[Section]]:
        """Sections of the methods that are chosen, or whose section is given where it alone chooses them."""
        return {method.name: method.settings for method in chosen_methods(given) if method.settings}

    @classmethod
    def choice_keys(cls) -> Collection[str]:
        return CHOICE_KEYS.values()

    @classmethod
    def possible_sections(cls) -> Mapping[str, type[Section]]:
        """Sections of all installed methods, those of the core first."""
        found = (method for kind in KINDS for method in methods(kind).values())
        return {method.name: method.settings for method in found if method.settings}

    @classmethod
    def choice_of(cls, section: str, given: Mapping[str, Any]) -> str:
        for kind, key in CHOICE_KEYS.items():
            if section in methods(kind):
                now = with_defaults(given).get(key, cls.model_fields[key].default)
                return f"algorithm.{key}{'=' if isinstance(now, str) else '+='}{section} (it is {now or 'empty'})"
        return ""

    @property
    def functions(self) -> list[tuple[str, str, Collection[str]]]:
        """Setting, value and installed names of each function that may be the user's own."""
        named = ((kind, key, name) for kind, key in CHOICE_KEYS.items() for name in names_in(getattr(self, key)))
        return [(f"algorithm.{key}", name, methods(kind)) for kind, key, name in named]

    @property
    def chosen_methods(self) -> tuple[Method, ...]:
        """The methods that are chosen, with the selection that the policy loss has tokens marked by. A user's own
        without a row is none."""
        return chosen_methods({**(self.model_extra or {}), **{key: getattr(self, key) for key in CHOICE_KEYS.values()}})

    @property
    def inserting_hooks(self) -> dict[str, int]:
        """Chosen ticket hooks that insert tokens, each with the trajectories of a group that it may insert whole."""
        hooks = chosen_hooks("ticket_hook", self)
        return {name: method.inserts(settings) for name, (method, settings) in hooks.items() if method.inserts}

    @property
    def replays_groups(self) -> bool:
        """True where steps may train groups of earlier steps once more."""
        return bool(chosen_hooks("replay_buffer", self))

    @property
    def entropy_control(self) -> EntropyControlConfig:
        """Settings of the entropy control; defaults, which do nothing, where its section is not there."""
        given = (self.model_extra or {}).values()
        return next((each for each in given if isinstance(each, EntropyControlConfig)), EntropyControlConfig())

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


def selection_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Name what is no selection and no filter, with the fix."""
    yield from _name_problems("algorithm.selections", config.selections, methods("selection"))
    yield from _name_problems("algorithm.filters", config.filters, methods("group_filter"))
    loss = method_of("policy_loss", config.policy_loss)
    if loss and (missing := sorted({*loss.defaults.get("selections", ())} - {*config.selections})):
        yield (f"algorithm.policy_loss {loss.name} needs the selection {missing[0]}. Add it to algorithm.selections")


def source_problems(config: AlgorithmConfig) -> Iterator[str]:
    kinds: tuple[tuple[Kind, str], ...] = (
        ("prompt_source", "choose the rows to visit"),
        ("replay_buffer", "choose the groups to train once more"),
    )
    for kind, effect in kinds:
        chosen = list(chosen_hooks(kind, config))
        if len(chosen) > 1:
            yield f"algorithm.{' and algorithm.'.join(chosen)} each {effect}. Leave all but one out"


def kl_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Name what makes no sense of a KL to the reference, with its fix."""
    if config.kl_loss_coef and config.kl_estimator == "k1":
        yield (
            f"algorithm.kl_estimator is k1 and algorithm.kl_loss_coef is {config.kl_loss_coef:g}: the gradient of k1 "
            "is that of log p, whose mean over samples is 0, so that it adds noise and no pull to the reference. "
            "Set algorithm.kl_estimator=k1+ (k1 with the gradient of the KL), k2 or k3, or use "
            "algorithm.kl_reward_coef instead"
        )
    if config.kl_reward_coef and config.kl_estimator == "k3_unbiased":
        yield (
            f"algorithm.kl_estimator is k3_unbiased and algorithm.kl_reward_coef is {config.kl_reward_coef:g}: its "
            "weight policy / behaviour corrects a gradient, and a reward has none. Set algorithm.kl_estimator=k1, "
            "or use algorithm.kl_loss_coef instead"
        )
    if config.kl_control.kind != "fixed" and not (config.kl_loss_coef or config.kl_reward_coef):
        yield (
            f"algorithm.kl_control.kind is {config.kl_control.kind}, but there is nothing to control: "
            "algorithm.kl_loss_coef and algorithm.kl_reward_coef are 0. Set one of them, or kind to fixed"
        )
    readers = [("adv_estimator", method_of("advantage", config.adv_estimator))]
    readers += [("selections", method_of("selection", name)) for name in config.selections]
    for key, method in readers if config.kl_reward_coef else ():
        if method and method.plain_scores:
            yield (
                f"algorithm.kl_reward_coef is {config.kl_reward_coef:g}, but algorithm.{key} {method.name} reads "
                f"scores as they were given ({method.formula}): nothing can be taken from them. Set "
                "algorithm.kl_loss_coef instead, or choose another one"
            )


def insertion_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Name what does not go with inserted tokens, or is not there without them, with its fix."""
    loss, hooks = method_of("policy_loss", config.policy_loss), config.inserting_hooks
    for method in config.chosen_methods:
        if "inserted" in method.needs and not hooks:
            able = [f"algorithm.{name}" for name, each in methods("ticket_hook").items() if each.inserts]
            yield f"{method.name} needs {NEEDS['inserted']}. Set {' or '.join(able) or 'the section of a plug-in'}"
    names = " and ".join(f"algorithm.{name}" for name in hooks)
    if len(hooks) > 1:
        yield f"{names} each insert tokens. Leave all but one out"
    if hooks and (loss is None or "inserted" not in loss.needs):
        able = ", ".join(name for name, each in methods("policy_loss").items() if "inserted" in each.needs)
        yield (
            f"{names} inserts tokens, which algorithm.policy_loss {config.policy_loss} does not learn from. Choose one "
            f"of {able or 'a plug-in'}, or leave {names} out"
        )
    if hooks and "critic" in config.needs:
        yield (
            f"algorithm.adv_estimator {config.adv_estimator} needs {NEEDS['critic']}, which is not trained on tokens "
            f"that {names} inserts. Choose an estimator without one, such as grpo"
        )


def proximal_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Name what would need another proximal policy, or weigh twice, with its fix."""
    correction, kinds = config.correction, {mask.kind for mask in config.correction.masks}
    idle = sorted(kinds & {"sequence", "geometric", "veto"})
    if config.proximal == "behaviour" and (correction.kind != "none" or idle):
        yield (
            "algorithm.proximal is behaviour, so pi_proximal / pi_behaviour is 1 and these would do nothing: "
            f"algorithm.correction.kind {correction.kind}, masks {', '.join(idle) or 'none'}. "
            "Set algorithm.proximal=recompute, or algorithm.correction.kind=none without such masks"
        )
    askers = [(method.name, method.needs) for method in config.chosen_methods]
    askers += [("kl_reward_coef", config.needs & {"proximal"})] if config.kl_reward_coef else []
    for name, needs in askers if config.proximal != "recompute" else ():
        for need in sorted(needs & {"proximal", "entropies"}):
            yield (
                f"{name} needs the {NEEDS[need]}, but algorithm.proximal is {config.proximal}. "
                "Set algorithm.proximal=recompute"
            )
    loss = method_of("policy_loss", config.policy_loss)
    if loss and loss.weighs_behaviour and (correction.kind != "none" or "dppo_tv" in kinds):
        yield (
            f"algorithm.policy_loss {loss.name} already weighs by pi_target / pi_behaviour. "
            "Set algorithm.correction.kind=none and leave the dppo_tv mask out"
        )


def _name_problems(setting: str, names: Collection[str], known: Collection[str]) -> Iterator[str]:
    for name in names:
        if name not in known and ":" not in name:
            yield f"{setting} has {name!r}, which is {what_it_may_be(name, known, setting, 'methods')}"
    if len(set(names)) < len(names):
        yield (f"{setting} has one twice: {', '.join(names)}. Keep one")
