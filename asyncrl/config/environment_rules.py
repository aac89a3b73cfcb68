"""Settings that an environment implies, and those that do not go with one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.config.environment import LimitsConfig
from asyncrl.config.method import NEEDS
from asyncrl.config.run_sections import RunSections
from asyncrl.plugins import description, installed


def imply_response_length(values: Any) -> Any:
    """Set data.max_response_length or environment.limits.tokens from the other: with an environment both are the number
    of tokens behind the prompt. The one that is not given follows from the other."""
    if not isinstance(values, dict):
        return values
    environment, data = values.get("environment"), values.get("data")
    if not isinstance(environment, dict) or not isinstance(data, dict) or not environment.get("name"):
        return values
    limits = environment.get("limits", {})
    if not isinstance(limits, dict):
        return values
    tokens = limits.get("tokens", data.get("max_response_length", LimitsConfig.model_fields["tokens"].default))
    environment = {**environment, "limits": {**limits, "tokens": tokens}}
    return {**values, "environment": environment, "data": {"max_response_length": tokens, **data}}


def environment_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that does not go with the environment, with its fix."""
    environment, data, algorithm = config.environment, config.data, config.algorithm
    several = "environment.limits.turns is 1" if environment.is_used else "there is no environment"
    for method in algorithm.chosen_methods if not environment.is_used or environment.limits.turns == 1 else ():
        if "turns" in method.needs:
            yield (
                f"{method.name} needs {NEEDS['turns']}, and {several}: each trajectory is one turn, of which it has "
                "nothing to tell apart. Set environment.name and environment.limits.turns, or "
                "choose algorithm.adv_estimator=grpo"
            )
    given = config.evaluation.limits.given
    if not environment.is_used:
        if given:
            yield (
                f"evaluation.limits has {', '.join(given)}, and there is no environment: a held-out row is one turn "
                "of at most data.max_response_length tokens. Leave it out"
            )
        return
    if (limits := config.evaluation_limits).tokens_per_turn > limits.tokens:
        yield (
            f"held-out rows may have {limits.tokens_per_turn} tokens in a turn and {limits.tokens} in all "
            "(evaluation.limits, and environment.limits where it has nothing). Lower the former or raise the latter"
        )
    if environment.limits.tokens != data.max_response_length:
        yield (
            f"environment.limits.tokens is {environment.limits.tokens} and data.max_response_length "
            f"{data.max_response_length}: both are the most tokens behind a prompt. Give one of them"
        )
    largest = max(config.trajectories_per_group, config.evaluation.group_size)
    if environment.capacity < largest:
        yield (
            f"environment.workers x environment.instances_per_worker is {environment.capacity}, and the {largest} "
            "trajectories of a group are live at the same time. Raise one of them"
        )
    if 2 * environment.timeouts.trajectory_s > config.learner.wait_timeout_s:
        yield (
            f"environment.timeouts.trajectory_s ({environment.timeouts.trajectory_s:g}) is more than half of "
            f"learner.wait_timeout_s ({config.learner.wait_timeout_s:g}), after which the run stops. Raise the latter"
        )
    if environment.name in installed("environments"):
        yield from description("environments", environment.name).problems(config)
