"""Imports of code that no test runs: measurements, scripts, recipes, examples and rigs that are started by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BY_HAND = ("benchmarks", "examples", "recipes", "scripts", "tests/rigs")
CORE = ("asyncrl", "asyncrl_plugins", "learner", "protocol", "rollout_server")
OURS = (*CORE, "benchmarks", "recipes", "scripts", "tests")


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def bound_in(file: Path) -> frozenset[str]:
    """Names that a module binds outside functions and classes, in whatever branch."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(text_of(file), str(file))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
                continue
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name)
            waiting.append(node)
    return frozenset(found)


def has(file: Path, name: str) -> bool:
    """The usual definition is found without parsing the file, which would take most of the time."""
    usual = rf"^(?:(?:async )?def|class) {name}\b|^{name}(?:: .*)? ="
    return bool(re.search(usual, text_of(file), re.MULTILINE)) or name in bound_in(file)


def file_of(module: str, beside: Path) -> Path | None:
    """File of one of our modules; of a script's neighbour, as Python finds it, too. None for other code."""
    parts = module.split(".")
    for root in (beside.parent, ROOT):
        path = root.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file() and (root != ROOT or parts[0] in OURS):
                return file
    return None


def wrong_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(text_of(file), str(file))):
        if isinstance(node, ast.Import):
            for module in (alias.name for alias in node.names):
                if module.partition(".")[0] in OURS and file_of(module, file) is None:
                    yield f"line {node.lineno}: no module {module}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            source = file_of(module, file)
            if source is None:
                if module.partition(".")[0] in OURS:
                    yield f"line {node.lineno}: no module {module}"
                continue
            for name in (alias.name for alias in node.names):
                if not has(source, name) and file_of(f"{module}.{name}", file) is None:
                    yield f"line {node.lineno}: {module} has no {name}"


def test_every_name_that_is_imported_from_our_code_is_there() -> None:
    files = [file for folder in BY_HAND for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    wrong = [f"{file.relative_to(ROOT)}, {problem}" for file in files for problem in wrong_imports(file)]
    assert not wrong, "\n".join(wrong)
