"""Decorators of methods. What they say is read from the source (asyncrl/config/methods.py), for configurations are
checked where there is no torch; here a name becomes its function. A user's own method may have one, too."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from asyncrl import user_functions
from asyncrl.config.methods import Kind, methods
from asyncrl.errors import BadStateError

F = TypeVar("F", bound=Callable[..., object])


Defaults = Mapping[str, object]


def advantage(
    *,
    formula: str,
    paper: str = "",
    needs: tuple[str, ...] = (),
    defaults: Defaults | None = None,
    plain_scores: bool = False,
    compares_rows: bool = False,
) -> Callable[[F], F]:
    """Make `f(trajectories, config) -> Credit` a value of `algorithm.adv_estimator`.

    `plain_scores`: scores or components are read as they were given, so that no penalty may be in them.
    `compares_rows`: rows of a group get credit by each other, so that a group of one gets none.
    """
    return lambda function: function


def policy_loss(
    *,
    formula: str,
    paper: str = "",
    needs: tuple[str, ...] = (),
    defaults: Defaults | None = None,
    weighs_behaviour: bool = False,
    weighs_trajectories: bool = False,
    marks: str = "",
    credits_demonstrations: bool = False,
    shares_denominator: bool = False,
) -> Callable[[F], F]:
    """Make `f(tokens, config) -> PolicyLoss` a value of `algorithm.policy_loss`.

    `weighs_behaviour`: the loss weighs by target over behaviour policy itself, so that no correction may.
    `weighs_trajectories`: a ratio in it is that of a whole trajectory, all of whose tokens must be there.
    `marks`: the selection whose tokens are `tokens.marked`: a built-in, or a function of the same file.
    `credits_demonstrations`: they are members of their group, whose scores count in its statistics and which get an
    advantage. `shares_denominator`: `loss_agg_mode` is over inserted and sampled tokens together, not over the sampled
    ones beside a mean over the inserted ones.
    """
    return lambda function: function


def selection(
    *, formula: str, paper: str = "", needs: tuple[str, ...] = (), takes_from: str = "loss"
) -> Callable[[F], F]:
    """Make `f(trajectories, credit, config) -> [N] bool` a name in `algorithm.selections`.

    `takes_from`: of asyncrl.config.methods.TAKES_FROM, what the chosen tokens leave.
    """
    return lambda function: function


def group_filter(*, formula: str, paper: str = "") -> Callable[[F], F]:
    """Make `f(group, config) -> reason or None` a name in `algorithm.filters`."""
    return lambda function: function


def load_method(kind: Kind, name: str, setting: str) -> Any:
    """The built-in of this name, or the user's function, whose file is run. UserErrors name the `setting`."""
    located = user_functions.locate(name, methods(kind), setting)
    if located is None:
        return getattr(importlib.import_module(methods(kind)[name].module), name)
    function = user_functions.load(located)
    return _checked(function, kind, f"{setting} {name}", str(located.path)) if kind != "group_filter" else function


CHECKED: Mapping[Kind, str] = {
    "advantage": "a Credit whose advantages are",
    "policy_loss": "a PolicyLoss whose token_loss is",
}
"""Answers whose shape is looked at here. A selection's is where it is used."""


def _checked(function: Callable[..., Any], kind: Kind, what: str, file: str) -> Callable[..., Any]:
    """The user's method, whose mistakes are bad states that name it: another attempt would meet them again. Group
    filters are called where the row is known, too."""

    @functools.wraps(function)
    def call(seen: Any, *more: Any) -> Any:
        try:
            answer = function(seen, *more)
        except (BadStateError, torch.OutOfMemoryError):  # memory is the token budget's affair
            raise
        except Exception as error:
            raise BadStateError(f"{what} failed: {user_functions.one_line(error, file)}") from error
        values = getattr(answer, "advantages" if kind == "advantage" else "token_loss", None)
        shape, expected = getattr(values, "shape", None), seen.row.shape
        if kind in CHECKED and shape != expected:
            found = type(answer).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
            raise BadStateError(
                f"{what} answered a {found}: expected {CHECKED[kind]} of shape {tuple(expected)}, one for each trained "
                "token (docs/bring-your-own.md)"
            )
        return answer

    return call
