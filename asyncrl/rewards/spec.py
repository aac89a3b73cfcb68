"""From `reward.functions` in the configuration to functions, with mistakes found before anything starts."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import user_functions
from asyncrl.errors import UserError, did_you_mean
from asyncrl.plugins import Reward, description, implementation, installed
from asyncrl.rewards.builtin import BUILTIN_REWARDS
from asyncrl.rewards.sample import RewardSample

if TYPE_CHECKING:
    from asyncrl.config.environment import EnvironmentConfig
    from asyncrl.config.sections import RewardConfig, RewardFunctionConfig

SETTING = "a function in reward.functions"
LISTS = {
    "completions": "the policy's texts",
    "prompts": "texts of the prompts",
    "images": "the prompts' images",
    "answer": "data.answer_key",
}
"""Names of the lists that a function of TRL's form takes, whatever columns are called so, and their meanings."""


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
        named += f", and the environment {environment.name} answers calls without rewarding a turn"
    raise UserError(
        f"{named}: no trajectory would have a reward. Name a function, such as reward.functions=[{{function: "
        "exact_match}], or an environment that rewards its turns (environment.name=file.py:Class)"
    )


def check_rewards(config: RewardConfig) -> None:
    """Raise UserError for every mistake that can be seen without running the user's files.

    `RewardScorer.start` goes further: it loads them in its workers.
    """
    for component in config.functions:
        name = component.function
        scorer = scorer_of(component)
        if scorer is not None:
            scorer.check(component)
            continue
        located = locate(name)
        if located is not None:
            _check_names(located.path, located.name)
            continue
        is_group = name not in BUILTIN_REWARDS and description("rewards", name).is_group
        if is_group and not component.group:
            raise UserError(f"reward {name} compares the completions of a group. Add `group: true` to its entry")
        if component.group and not is_group:
            raise UserError(f"reward {name} scores one completion at a time. Remove `group` from its entry")
        check_call(load_reward(name), name, component.kwargs, shapes=bool(component.shapes))


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


def call_reward(
    function: Callable[..., Any],
    samples: Sequence[RewardSample],
    kwargs: Mapping[str, Any],
    scores: Sequence[float | None] | None = None,
    *,
    group: bool = False,
) -> Sequence[Any]:
    """One value for each sample: of `function(sample, **kwargs)`, or with `group` of `function(samples, **kwargs)`.

    A function with a parameter `completions` is called as TRL does, with lists: `prompts` and `completions` (texts),
    `images`, `answer`, and the row's other columns by name, as far as the function takes them. It returns a list.
    `scores` are values of another component, which the function gets as `score`.
    """
    parameters = _parameters(function)
    many = kwargs if scores is None else {**kwargs, "score": list(scores)}
    if "completions" in parameters:
        known = [
            {
                **sample.columns,
                "completions": sample.completion,
                "prompts": sample.prompt,
                "images": sample.images,
                "answer": sample.answer,
            }
            for sample in samples
        ]
        lists = {name: [values[name] for values in known] for name in known[0]} | dict(many)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        taken = {name: value for name, value in lists.items() if takes_all or name in parameters}
        return _as_many(function(**taken), samples)
    if group:
        return _as_many(function(samples, **many), samples)
    (sample,) = samples
    return [function(sample, **(kwargs if scores is None else {**kwargs, "score": scores[0]}))]


def _as_many(returned: Any, samples: Sequence[RewardSample]) -> Sequence[Any]:
    """The values for each sample: of a list, or a one-dimensional array or tensor. Raises TypeError."""
    if getattr(returned, "ndim", None) == 1 and hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != len(samples):
        few = "one reward for one completion" if len(samples) == 1 else f"{len(samples)} rewards, one per completion"
        raise TypeError(f"expected a list of {few}, got {returned!r:.100}")
    return returned


def hidden_columns(config: RewardConfig, columns: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each of the rows' `columns` that a function of TRL's form does not get, because an argument
    of another meaning has its name. The user's files are read, not run."""
    for component in config.functions:
        named, takes_all = _taken_lists(component)
        given = {**dict.fromkeys(component.kwargs, "given in its kwargs"), **LISTS}
        if component.shapes:
            given["score"] = "the score that it shapes"
        for name in given if "completions" in named else ():
            if name in columns and (takes_all or name in named):
                yield (
                    f"column {name!r} does not reach the reward {component.function}, where `{name}` is {given[name]}. "
                    "Rename the column if the reward needs it"
                )


def _taken_lists(component: RewardFunctionConfig) -> tuple[Collection[str], bool]:
    """Parameters of a function, and whether it takes any other; those that TRL gives where that is seen only when the
    file runs, and the file names `completions`."""
    located = locate(component.function)
    if located is None:
        parameters = {} if scorer_of(component) else _parameters(load_reward(component.function))
        return parameters, any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    source = user_functions.read_source(located.path)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == located.name:
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            return [one.arg for one in every], arguments.kwarg is not None
    return (LISTS, True) if re.search(rb"\bcompletions\b", source) else ((), False)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have none
        return {}


def check_call(function: Callable[..., Any], name: str, kwargs: dict[str, Any], *, shapes: bool = False) -> None:
    """Raise UserError if `function(sample, **kwargs)` cannot be called, or for `completions` with these kwargs.

    `shapes`: it also gets a `score`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    score = signature.parameters.get("score")
    if score and score.default is score.empty and not shapes and "score" not in kwargs:
        fix = "Add `shapes` to its entry: the name of a component above it, or `sum`"
        raise UserError(f"reward {name}{signature} wants the score of another component. {fix}")
    kwargs = kwargs | ({"score": None} if shapes else {})
    try:
        if "completions" in signature.parameters:  # which columns the rows have is seen when it is called
            if taken := [key for key in kwargs if key in LISTS]:
                raise UserError(
                    f"reward {name}{signature} has the kwargs {', '.join(taken)}, which would replace "
                    f"{LISTS[taken[0]]}. Give that argument another name"
                )
            signature.bind_partial(**kwargs)
        else:
            signature.bind(None, **kwargs)
    except TypeError as error:
        if shapes and "'score'" in str(error):
            fix = "Remove `shapes` from its entry, or give it a parameter `score`"
            raise UserError(f"reward {name}{signature} takes no score of another component. {fix}") from error
        known = list(signature.parameters)[1:]
        near = "".join(did_you_mean(key, known) for key in kwargs if key not in known)
        raise UserError(
            f"reward {name}{signature} cannot be called with a sample and kwargs {kwargs}: {error}.{near}"
        ) from error
