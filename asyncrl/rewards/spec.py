"""From `reward.functions` in the configuration to functions, with mistakes found before anything starts."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import plugins
from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import UserError
from asyncrl.rewards.builtin import BUILTIN_REWARDS
from asyncrl.rewards.sample import RewardSample

if TYPE_CHECKING:
    from asyncrl.config.sections import RewardConfig

SETTING = "a function in reward.functions"


def load_reward(function: str) -> Callable[..., Any]:
    """The function of a built-in name, or the user's. Runs the file: use it in workers."""
    return plugins.resolve(function, BUILTIN_REWARDS, SETTING)


def locate(function: str) -> plugins.UserFunction | None:
    """File and name of the user's function, or None for a known built-in."""
    return plugins.locate(function, BUILTIN_REWARDS, SETTING)


def check_rewards(config: RewardConfig) -> None:
    """Raise UserError for every mistake that can be seen without running the user's files.

    `RewardPool.start` goes further: it loads them in its workers.
    """
    for component in config.functions:
        located = locate(component.function)
        if located is None:
            check_call(BUILTIN_REWARDS[component.function], component.function, component.kwargs)
        else:
            _check_names(located.path, located.name)


def call_reward(function: Callable[..., Any], sample: RewardSample, kwargs: Mapping[str, Any]) -> Any:
    """`function(sample, **kwargs)`; one with a parameter `completions` is called as TRL does.

    That is with lists, of one completion here: `prompts` and `completions` (texts), `images`, `answer`, and the row's
    columns by name, as far as the function takes them. It returns a list.
    """
    parameters = _parameters(function)
    if "completions" not in parameters:
        return function(sample, **kwargs)
    known = {"prompts": sample.prompt, "images": sample.images, "answer": sample.answer, **sample.columns}
    lists = {name: [value] for name, value in known.items()} | {"completions": [sample.completion], **kwargs}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    returned = function(**{name: value for name, value in lists.items() if takes_all or name in parameters})
    if not isinstance(returned, Sequence) or len(returned) != 1:
        raise TypeError(f"expected a list of one reward for one completion, got {returned!r:.100}")
    return returned[0]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have none
        return {}


def check_call(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> None:
    """Raise UserError if `function(sample, **kwargs)` cannot be called, or for `completions` with these kwargs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        if "completions" in signature.parameters:  # which columns the rows have is seen when it is called
            signature.bind_partial(**kwargs)
        else:
            signature.bind(None, **kwargs)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        near = "".join(did_you_mean(key, known) for key in kwargs if key not in known)
        raise UserError(
            f"reward {name}{signature} cannot be called with a sample and kwargs {kwargs}: {error}.{near}"
        ) from error


def _check_names(path: Path, name: str) -> None:
    """Raise UserError if the source does not name the function. Only running the file can tell whether it has one."""
    source = plugins.read_source(path)
    try:
        body = ast.parse(source, str(path)).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be imported: {plugins.one_line(error)}") from error
    if not re.search(rf"\b({re.escape(name)}\b|import \*)", source.decode(errors="replace")):
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        raise UserError(f"{path} has no function {name!r}.{did_you_mean(name, functions)}")
