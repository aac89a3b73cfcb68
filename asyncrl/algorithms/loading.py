"""A method's name becomes its function: a built-in's, a plug-in's, or the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncrl import plugins, user_functions
from asyncrl.config.installed_methods import methods
from asyncrl.config.method import Kind
from asyncrl.errors import BadStateError

CHECKED: Mapping[Kind, str] = {
    "advantage": "a Credit whose advantages are",
    "policy_loss": "a PolicyLoss whose token_loss is",
}
"""Answers whose shape is checked here. A selection's is where it is used."""


def load_method(kind: Kind, name: str, setting: str) -> Any:
    """Load the installed method of this name, or the user's function, whose file is run. UserErrors name the
    `setting`."""
    located = user_functions.locate(name, methods(kind), setting, "methods")
    if located is None:
        return plugins.implementation(methods(kind)[name].implementation)
    function = user_functions.load(located)
    return _checked(function, kind, f"{setting} {name}", str(located.path)) if kind != "group_filter" else function


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
