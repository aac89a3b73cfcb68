"""From `reward.functions` in the configuration to functions, with mistakes found before anything starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import user_functions
from asyncrl.errors import UserError
from asyncrl.rewards.builtin import BUILTIN_REWARDS, SERVICES
from asyncrl.rewards.calls import check_call
from asyncrl.rewards.shaping import OF_GROUPS
from asyncrl.suggest import did_you_mean

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig
    from asyncrl.config.sections import RewardConfig

SETTING = "a function in reward.functions"


def load_reward(function: str) -> Callable[..., Any]:
    """The function of a built-in name, or the user's. Runs the file: use it in workers."""
    return user_functions.resolve(function, BUILTIN_REWARDS, SETTING)


def locate(function: str) -> user_functions.UserFunction | None:
    """File and name of the user's function, or None for a known built-in."""
    return user_functions.locate(function, [*BUILTIN_REWARDS, *SERVICES], SETTING)


def check_rewarded(config: RunConfig) -> None:
    """Raise UserError where nothing would say how good a trajectory is."""
    environment = config.environment
    if config.reward.functions or environment.may_reward:
        return
    named = "reward.functions is empty"
    if environment.is_used:
        what = "an MCP server" if environment.name else "environment.tools"
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
        if name in SERVICES:
            from asyncrl.rewards.service_settings import check_service  # pydantic, which workers do without

            check_service(component)
            continue
        if name in OF_GROUPS and not component.group:
            raise UserError(f"reward {name} compares the completions of a group. Add `group: true` to its entry")
        located = locate(name)
        if located is None:
            if component.group and name not in OF_GROUPS:
                raise UserError(f"reward {name} scores one completion at a time. Remove `group` from its entry")
            check_call(BUILTIN_REWARDS[name], name, component.kwargs, shapes=bool(component.shapes))
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
