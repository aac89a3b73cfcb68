"""Methods of asyncrl/algorithms and of the user, read from their decorators: what they need, without importing torch.

A method is a function below `@advantage(...)`, `@policy_loss(...)`, `@selection(...)` or `@group_filter(...)`
(asyncrl/algorithms/registration.py), whose arguments are literals. A user's own function may have none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from asyncrl import user_functions
from asyncrl.errors import UserError
from asyncrl.suggest import did_you_mean

FOLDER = Path(__file__).parents[1] / "algorithms"
Kind = Literal["advantage", "policy_loss", "selection", "group_filter"]
KINDS: tuple[Kind, ...] = ("advantage", "policy_loss", "selection", "group_filter")
NEEDS: Mapping[str, str] = {
    "proximal": "log-probs of the policy at the start of the step, over the whole batch",
    "entropies": "entropies of the policy at the start of the step, over the whole batch",
    "squared_probabilities": "sums of the squared probabilities of the policy at the start of the step, over the whole "
    "batch",
    "reference": "log-probs of the reference policy",
    "critic": "values of a critic",
    "greedy_row": "a greedy completion in every group, scored and not trained",
    "turns": "trajectories of several turns, in an environment",
    "demonstrations": "demonstrations or hints of data.target_key among the trained tokens",
}
"""Inputs that a method may need besides scores, groups and behaviour log-probs."""

TAKES_FROM: Mapping[str, str] = {
    "loss": "all that the token adds to the loss",
    "policy_loss": "the token's policy loss; its entropy bonus and KL stay",
    "batch": "its whole trajectory, which is not trained: no denominator counts it",
}
"""Quantity that a selection removes a token from. Only the last changes a denominator."""

NO_CORRECTION: Mapping[str, Any] = {"correction": {"kind": "none"}}
"""Default of losses that weigh by target over behaviour themselves."""


@dataclass(frozen=True)
class Method:
    """A built-in method as its decorator and docstring describe it."""

    kind: Kind
    name: str
    module: str
    formula: str
    """One line."""
    paper: str
    """arXiv number; empty where there is none."""
    needs: frozenset[str]
    """Requirements, from NEEDS."""
    defaults: Mapping[str, Any]
    """Defaults for unset keys of the `algorithm` section where this method is chosen."""
    weighs_behaviour: bool
    """Whether a loss weighs by target over behaviour itself, so that no correction may."""
    weighs_trajectories: bool
    """Whether a ratio in a loss is that of a whole trajectory."""
    marks: str
    """Selection whose tokens a loss gets as `tokens.marked` and treats in its own way; empty where it asks for none."""
    takes_from: str
    """Entry of TAKES_FROM, for a selection."""
    plain_scores: bool
    """Whether an estimator reads scores or components as they were given, so that no penalty may be in them."""
    compares_rows: bool
    """Whether an estimator gives the rows of a group credit by each other, so that a group of one gets none."""
    credits_demonstrations: bool
    """Whether demonstrations are members of their group to a loss: in its statistics, with an advantage."""
    shares_denominator: bool
    """Whether a loss is aggregated over inserted and sampled tokens together."""
    summary: str
    """First paragraph of the docstring."""


@cache
def methods(kind: Kind) -> Mapping[str, Method]:
    """The built-in methods of a kind by name: file after file, in the order of each."""
    return {method.name: method for method in _all_methods() if method.kind == kind}


def method_of(kind: Kind, name: str) -> Method | None:
    """The built-in of this name, or what the decorator of the user's function says; None where it has none, or cannot
    be read: whoever loads it says why. ValueError where the decorator itself is wrong."""
    if name in methods(kind) or ":" not in name:
        return methods(kind).get(name)
    try:
        located = user_functions.locate(name, (), kind)
        assert located is not None
        method = _methods_of_user(located.path, located.path.stat().st_mtime_ns).get(located.name)
    except (UserError, OSError, SyntaxError):
        return None
    if method is None or method.kind != kind:
        return None
    own_marks = method.marks and method.marks not in methods("selection") and ":" not in method.marks
    return replace(method, name=name, marks=f"{name.rpartition(':')[0]}:{method.marks}" if own_marks else method.marks)


@cache
def _methods_of_user(file: Path, mtime_ns: int) -> Mapping[str, Method]:
    try:
        found = {method.name: method for method in methods_in(file)}
    except (ValueError, KeyError) as error:
        problem = f"{file}: the arguments of a method's decorator are literals, and `formula` is one: {error}"
        raise ValueError(problem) from error
    for method in found.values():
        for need in sorted(method.needs - NEEDS.keys()):
            raise ValueError(
                f"{file}: {method.name} needs {need!r}, which nothing provides.{did_you_mean(need, NEEDS)} "
                f"There are {', '.join(NEEDS)}"
            )
        if method.takes_from not in TAKES_FROM:
            raise ValueError(f"{file}: {method.name} takes from {method.takes_from!r}: it is {', '.join(TAKES_FROM)}")
    return found


@cache
def _all_methods() -> tuple[Method, ...]:
    return tuple(method for file in sorted(FOLDER.glob("*.py")) for method in methods_in(file))


def methods_in(file: Path) -> Iterator[Method]:
    """Yield the methods of a file."""
    for node in ast.parse(file.read_text()).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            assert isinstance(node, ast.FunctionDef)
            kind = decorator.func.id if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) else ""
            if isinstance(decorator, ast.Call) and kind in KINDS:
                facts = {argument.arg: ast.literal_eval(argument.value) for argument in decorator.keywords}
                weighs_behaviour = facts.get("weighs_behaviour", False)
                yield Method(
                    kind=kind,
                    name=node.name,
                    module=f"asyncrl.algorithms.{file.stem}",
                    formula=facts["formula"],
                    paper=facts.get("paper", ""),
                    needs=frozenset(facts.get("needs", ())),
                    defaults=facts.get("defaults", {}) | (NO_CORRECTION if weighs_behaviour else {}),
                    weighs_behaviour=weighs_behaviour,
                    weighs_trajectories=facts.get("weighs_trajectories", False),
                    marks=facts.get("marks", ""),
                    takes_from=facts.get("takes_from", "loss"),
                    plain_scores=facts.get("plain_scores", False),
                    compares_rows=facts.get("compares_rows", False),
                    credits_demonstrations=facts.get("credits_demonstrations", False),
                    shares_denominator=facts.get("shares_denominator", False),
                    summary=" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()),
                )
