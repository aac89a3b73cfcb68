"""Built-in methods of asyncrl/algorithms, read from their decorators: names, needs and sources without importing torch.

A method is a function below `@advantage(...)`, `@policy_loss(...)` or `@selection(...)`
(asyncrl/algorithms/registration.py), whose arguments are literals.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parents[1] / "algorithms"
Kind = Literal["advantage", "policy_loss", "selection"]
KINDS: tuple[Kind, ...] = ("advantage", "policy_loss", "selection")
NEEDS: Mapping[str, str] = {
    "proximal": "log-probs of the policy at the start of the step, over the whole batch",
    "entropies": "entropies of that policy, over the whole batch",
    "squared_probabilities": "sums of that policy's squared probabilities, over the whole batch",
    "critic": "values of a critic",
    "greedy_row": "a greedy completion in every group, scored and not trained",
}
"""What a method may need besides scores, groups and behaviour log-probs."""

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
    """Of NEEDS."""
    defaults: Mapping[str, Any]
    """Of keys of the `algorithm` section that are left out where this method is chosen."""
    weighs_behaviour: bool
    """Whether a loss weighs by target over behaviour itself, so that no correction may."""
    summary: str
    """First paragraph of the docstring."""


@cache
def methods(kind: Kind) -> Mapping[str, Method]:
    """The built-in methods of a kind by name: file after file, in the order of each."""
    return {method.name: method for method in _all_methods() if method.kind == kind}


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
                    summary=" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()),
                )
