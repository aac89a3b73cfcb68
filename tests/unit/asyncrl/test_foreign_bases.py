"""Subclasses of classes that are not ours: a private name on one may be the base's own in its next release.

`threading.Thread` has had `_handle` since Python 3.13 and `_context` since 3.14: a thread that is held has none.
Names with two underscores are the class's own, whatever its base has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pydantic
import pytest

import asyncrl

ROOT = Path(asyncrl.__file__).parents[1]
PACKAGES = ("asyncrl", "learner", "rollout_server", "protocol", "asyncrl_plugins")
BARE = {
    *("object", "ABC", "Generic", "Protocol", "NamedTuple", "TypedDict", "AbstractContextManager"),
    *("Enum", "IntEnum", "StrEnum", "Exception", "ValueError", "RuntimeError", "TimeoutError", "KeyboardInterrupt"),
}
"""Bases without attributes of instances that a subclass could meet."""
CONTRACT = {
    "_init_weights": "transformers: how a model of this family begins",
    "_no_split_modules": "transformers: layers that stay whole",
    "_supports_attention_backend": "transformers: attention by name",
    "_supports_flash_attn": "transformers: attention by name",
    "_supports_sdpa": "transformers: attention by name",
    "_tied_weights_keys": "transformers: weights that share memory",
}
"""Private names by which a foreign base asks its subclasses."""


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Our classes by name, nested ones too."""
    found: dict[str, list[ast.ClassDef]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


def base_names(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        while isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name | ast.Attribute):
            yield base.id if isinstance(base, ast.Name) else base.attr


def foreign_bases(node: ast.ClassDef, known: dict[str, list[ast.ClassDef]]) -> set[str]:
    """Names of its bases that are not ours, those of our bases among them."""
    found: set[str] = set()
    for name in set(base_names(node)) - BARE - {node.name}:
        ours = known.get(name, [])
        found |= {name} if not ours else set().union(*(foreign_bases(each, known) for each in ours))
    return found


def private_names(node: ast.ClassDef) -> Iterator[str]:
    """Names with one underscore that its body or its methods, by their first argument, define."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
            if statement.args.args:
                yield from _assigned(statement, statement.args.args[0].arg)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _assigned(method: ast.AST, itself: str) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()) if name == itself:
                yield attribute


def found_names(known: dict[str, list[ast.ClassDef]]) -> list[str]:
    """`Class(Base): _name` for each private name that could meet one of a foreign base."""
    found: list[str] = []
    for node in (node for nodes in known.values() for node in nodes):
        bases = foreign_bases(node, known)
        for name in sorted({each for each in private_names(node) if each.startswith("_") and each[1:2] != "_"}):
            # Private methods are how pydantic's models have validators: those alone count that it has, too.
            meets = bool(bases - {"BaseModel"}) or ("BaseModel" in bases and hasattr(pydantic.BaseModel, name))
            if meets and name not in CONTRACT:
                found.append(f"{node.name}({', '.join(sorted(bases))}): {name}")
    return found


def test_no_private_name_of_ours_is_on_a_subclass_of_a_foreign_class() -> None:
    assert "BaseModel" in set().union(*(foreign_bases(each, classes()) for each in classes()["RunConfig"]))
    assert found_names(classes()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A(threading.Thread):\n    def _handle(self): ...", ["A(Thread): _handle"]),
        ("class A(Thread):\n    def __init__(self):\n        self._context = 1", ["A(Thread): _context"]),
        ("class A(logging.Handler):\n    _name: str = ''", ["A(Handler): _name"]),
        ("class A(nn.Module[int]): ...\nclass B(A):\n    async def _call(self): ...", ["B(Module): _call"]),
        (
            "class A(pydantic.BaseModel):\n    def _copy_and_set_values(self): ...",
            ["A(BaseModel): _copy_and_set_values"],
        ),
        ("class A(threading.Thread):\n    def __handle(self):\n        self.__context = 1", []),
        ("class A(Protocol):\n    def _own(self): ...\nclass B(A):\n    def _own(self): ...", []),
        ("class A(pydantic.BaseModel):\n    def _check_sizes(self): ...", []),
    ],
)
def test_the_search_finds_names_in_bodies_methods_and_below_our_own_bases(source: str, found: list[str]) -> None:
    known = {node.name: [node] for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    assert found_names(known) == found
