"""From `reward.functions` in the configuration to functions, with mistakes found before anything starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import user_functions
from asyncrl.errors import UserError, did_you_mean
from asyncrl.plugins import Reward, description, implementation, installed
from asyncrl.rewards.builtin import BUILTIN_REWARDS
from asyncrl.rewards.shaping import OF_GROUPS
from asyncrl.rewards.spec import check_call

if TYPE_CHECKING:
    from asyncrl.config.environment import EnvironmentConfig
    from asyncrl.config.sections import RewardConfig, RewardFunctionConfig

SETTING = "a function in reward.functions"


def load_reward(function: str) -> Callable[..., Any]:
    """Return the function of a name or the user's, whose file runs: use it in workers."""
    if function in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[function]
    located = locate(function)
    if located is None:
        return implementation(description("rewards", function).implementation)
    return user_functions.load(located)


def locate(function: str) -> user_functions.UserFunction | None:
    """File and name of the user's function, or None for a known name."""
    if function in BUILTIN_REWARDS:
        return None
    return user_functions.locate(function, [*BUILTIN_REWARDS, *installed("rewards")], SETTING, "rewards")


def scorer_of(component: RewardFunctionConfig) -> Reward | None:
    """Description of a plug-in's reward that is no function but scores by itself; None for every other."""
    name = component.function
    if name in BUILTIN_REWARDS or name not in installed("rewards"):
        return None
    found: Reward = description("rewards", name)
    return found if found.is_scorer else None


def check_rewarded(reward: RewardConfig, environment: EnvironmentConfig) -> None:
    """Raise UserError where nothing would say how good a trajectory is."""
    if reward.functions or environment.may_reward:
        return
    named = "reward.functions is empty"
    if environment.is_used:
        what = f"the environment {environment.name}" if environment.name else "environment.tools"
        named += f", and {what} answers calls without rewarding a turn"
    raise UserError(
        f"{named}: no trajectory would have a reward. Name a function, such as reward.functions=[{{function: "
        "exact_match}], or an environment that rewards its turns (environment.name=file.py:Class)"
    )


def check_rewards(config: RewardConfig) -> None:
    """Raise UserError for every mistake that can be seen without running the user's files.

    `RewardPool.start` goes further: it loads them in its workers.
    """
    for component in config.functions:
        name = component.function
        scorer = scorer_of(component)
        if scorer is not None:
            scorer.check(component)
            continue
        if name in OF_GROUPS and not component.group:
            raise UserError(f"reward {name} compares the completions of a group. Add `group: true` to its entry")
        located = locate(name)
        if located is None:
            if component.group and name not in OF_GROUPS:
                raise UserError(f"reward {name} scores one completion at a time. Remove `group` from its entry")
            check_call(load_reward(name), name, component.kwargs, shapes=bool(component.shapes))
        else:
            _check_names(located.path, located.name)


def _check_names(path: Path, name: str) -> None:
    """Raise UserError if the source does not name the function. Only running the file can tell whether it has one."""
    source = user_functions.read_source(path)
    try:
        body = ast.parse(source, str(path)).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be imported: {user_functions.one_line(error)}") from error
    if not re.search(rf"\b({re.escape(name)}\b|import \*)", source.decode(errors="replace")):
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        raise UserError(f"{path} has no function {name!r}.{did_you_mean(name, functions)}")
