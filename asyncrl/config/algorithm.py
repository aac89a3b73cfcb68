"""The `algorithm` section: defaults of the chosen methods, and which of its keys fit each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import model_validator

from asyncrl.config.algorithm_settings import AlgorithmSettings
from asyncrl.config.installed_methods import chosen_hooks, method_of, methods, with_defaults
from asyncrl.config.method import NEEDS
from asyncrl.user_functions import what_it_may_be


class AlgorithmConfig(AlgorithmSettings):
    """Keys that are left out take the defaults of the chosen `adv_estimator` and `policy_loss`, where these have their
    own (docs/algorithms.md), and those below elsewhere."""

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


def selection_problems(config: AlgorithmSettings) -> Iterator[str]:
    """Name what is no selection and no filter, with the fix."""
    yield from _name_problems("algorithm.selections", config.selections, methods("selection"))
    yield from _name_problems("algorithm.filters", config.filters, methods("group_filter"))
    loss = method_of("policy_loss", config.policy_loss)
    if loss and (missing := sorted({*loss.defaults.get("selections", ())} - {*config.selections})):
        yield (f"algorithm.policy_loss {loss.name} needs the selection {missing[0]}. Add it to algorithm.selections")


def source_problems(config: AlgorithmSettings) -> Iterator[str]:
    sources = list(chosen_hooks("prompt_source", config))
    if len(sources) > 1:
        yield f"algorithm.{' and algorithm.'.join(sources)} each choose the rows to visit. Leave all but one out"


def kl_problems(config: AlgorithmSettings) -> Iterator[str]:
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


def insertion_problems(config: AlgorithmSettings) -> Iterator[str]:
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


def proximal_problems(config: AlgorithmSettings) -> Iterator[str]:
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
            yield f"{setting} has {name!r}, which is {what_it_may_be(name, known, setting)}"
    if len(set(names)) < len(names):
        yield (f"{setting} has one twice: {', '.join(names)}. Keep one")
