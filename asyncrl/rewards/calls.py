"""Calls of reward functions: with a sample, with those of a group, or with lists as TRL makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.errors import UserError, did_you_mean
from asyncrl.rewards.sample import RewardSample


def call_reward(function: Callable[..., Any], sample: RewardSample, kwargs: Mapping[str, Any]) -> Any:
    """`function(sample, **kwargs)`; one with a parameter `completions` is called as TRL does.

    That is with lists, of one completion here: `prompts` and `completions` (texts), `images`, `answer`, and the row's
    columns by name, as far as the function takes them. It returns a list.
    """
    if "completions" not in _parameters(function):
        return function(sample, **kwargs)
    lists = {"score": [kwargs["score"]]} if "score" in kwargs else {}
    return _call_with_lists(function, [sample], {**kwargs, **lists})[0]


def call_group_reward(
    function: Callable[..., Any], samples: Sequence[RewardSample], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """One value for each sample: `function(samples, **kwargs)`, or with TRL's lists as `call_reward` makes them."""
    if "completions" in _parameters(function):
        return _call_with_lists(function, samples, kwargs)
    return _as_many(function(samples, **kwargs), samples)


def _call_with_lists(
    function: Callable[..., Any], samples: Sequence[RewardSample], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    parameters = _parameters(function)
    known = [
        {
            "completions": sample.completion,
            "prompts": sample.prompt,
            "images": sample.images,
            "answer": sample.answer,
            **sample.columns,
        }
        for sample in samples
    ]
    lists = {name: [values[name] for values in known] for name in known[0]} | dict(kwargs)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return _as_many(
        function(**{name: value for name, value in lists.items() if takes_all or name in parameters}), samples
    )


def _as_many(returned: Any, samples: Sequence[RewardSample]) -> Sequence[Any]:
    """The values for each sample: of a list, or a one-dimensional array or tensor. Raises TypeError."""
    if getattr(returned, "ndim", None) == 1 and hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != len(samples):
        few = "one reward for one completion" if len(samples) == 1 else f"{len(samples)} rewards, one per completion"
        raise TypeError(f"expected a list of {few}, got {returned!r:.100}")
    return returned


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
