"""Look a method up by its name: in the core, in installed plug-ins, or in the user's own file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl import plugins, user_functions
from asyncrl.config.method import BY_SECTION, KINDS, NEEDS, TAKES_FROM, Kind, Method, MethodSet
from asyncrl.config.methods import METHODS
from asyncrl.config.sections import OpenSection, Section, names_in
from asyncrl.errors import UserError, did_you_mean

OF_PACKAGES = {"implementation", "name", "settings", "problems", "notes", "inserts", "bytes_per_token", "models"}
USER_FIELDS = {field.name for field in fields(Method)} - OF_PACKAGES
"""Fields of Method that a user's METHODS may give: literals."""


@cache
def method_sets() -> Mapping[str, MethodSet]:
    """Methods of the core, under an empty name, and of each plug-in. Raises UserError where two have one name."""
    found = {"": METHODS, **plugins.descriptions("methods")}
    for kind in KINDS:
        names = [name for each in found.values() for name in each.rows(kind)]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two installed packages have the {kind} {name}. Uninstall one of them")
    return found


@cache
def methods(kind: Kind) -> Mapping[str, Method]:
    """The installed methods of a kind by name, those of the core first."""
    return {
        name: replace(method, name=name) for each in method_sets().values() for name, method in each.rows(kind).items()
    }


def method_of(kind: Kind, name: str) -> Method | None:
    """The installed method of this name, or the row of the user's function in METHODS of its file; None where it has
    none, or the file cannot be read: loading it says why. Raises ValueError for a wrong row."""
    if name in methods(kind) or ":" not in name:
        return methods(kind).get(name)
    try:
        located = user_functions.locate(name, (), kind)
        assert located is not None
        method = _methods_of_user(located.path, located.path.stat().st_mtime_ns).get(located.name)
    except (UserError, OSError, SyntaxError):
        return None
    if method is None:
        return None
    own_marks = method.marks and method.marks not in methods("selection") and ":" not in method.marks
    marks = f"{name.rpartition(':')[0]}:{method.marks}" if own_marks else method.marks
    return replace(method, name=name, implementation=name, marks=marks)


def chosen_methods(given: Mapping[str, Any]) -> tuple[Method, ...]:
    """Methods that the values of an `algorithm` section choose, checked or not.

    Estimator, loss, selections with the one that the loss has tokens marked by, filters, additions. A user's own
    function without a row is none.
    """
    filled = with_defaults(given)
    loss = method_of("policy_loss", str(filled.get("policy_loss", "ppo")))
    marks = [loss.marks] if loss and loss.marks else []
    selections = dict.fromkeys((*names_in(filled.get("selections")), *marks))
    found = (
        method_of("advantage", str(filled.get("adv_estimator", "grpo"))),
        loss,
        *(method_of("selection", name) for name in selections),
        *(method_of("group_filter", name) for name in names_in(filled.get("filters"))),
        *(method for kind in BY_SECTION for name, method in methods(kind).items() if name in filled),
    )
    return tuple(method for method in found if method)


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an `algorithm` section with defaults of the chosen loss and estimator where it leaves a key out.

    The loss goes first: a key that it leaves open the estimator may give. An estimator may name the loss itself.
    """
    filled = dict(given)
    estimator = method_of("advantage", str(filled.get("adv_estimator", "grpo")))
    loss_name = filled.get("policy_loss") or (estimator.defaults.get("policy_loss") if estimator else None) or "ppo"
    loss = method_of("policy_loss", str(loss_name))
    for method in filter(None, (loss, estimator)):
        for key, value in method.defaults.items():
            own = filled.get(key, value)  # of a section, the given keys over the default ones
            filled[key] = {**value, **own} if isinstance(value, dict) and isinstance(own, dict) else own
    return filled


def chosen_hooks(kind: Kind, algorithm: OpenSection) -> dict[str, tuple[Method, Section]]:
    """Hooks of a kind that an `algorithm` section chooses, by name, each with its settings."""
    given = algorithm.model_extra or {}
    return {name: (method, given[name]) for name, method in methods(kind).items() if name in given}


@cache
def _methods_of_user(file: Path, mtime_ns: int) -> Mapping[str, Method]:
    """Rows of METHODS in the user's file, a literal dict: its text is read, and the file is not run. ValueError says
    which row is wrong."""
    return {name: _row(file, name, row) for name, row in _literal_rows(file)}


def _literal_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(file.read_bytes()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [getattr(target, "id", "") for target in targets] == ["METHODS"] and isinstance(node, ast.Assign):
            try:
                yield from dict(ast.literal_eval(node.value)).items()
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{file} line {node.lineno}: METHODS is no literal dict of dicts, such as "
                    f'{{"function": {{"needs": ["entropies"]}}}}: {error}. It is read without running the file'
                ) from error


def _row(file: Path, name: str, row: Any) -> Method:
    where = f"{file}: METHODS[{name!r}]"
    for key in sorted(row.keys() - USER_FIELDS) if isinstance(row, dict) else [repr(row)]:
        raise ValueError(
            f"{where} has {key}.{did_you_mean(key, USER_FIELDS)} It is a dict of {', '.join(sorted(USER_FIELDS))}"
        )
    method = Method("", **row)
    for need in sorted(set(method.needs) - NEEDS.keys()):
        raise ValueError(
            f"{where} needs {need!r}, which nothing provides.{did_you_mean(need, NEEDS)} There are {', '.join(NEEDS)}"
        )
    if method.takes_from not in TAKES_FROM:
        raise ValueError(f"{where} takes from {method.takes_from!r}: it is {', '.join(TAKES_FROM)}")
    return method
