"""Functions and classes of a notebook or script, written as a file that worker processes load as any other.

Source travels, no object: what the function names is written with it. So the run's journal hashes and records it as a
file's, a server that starts again finds it, and `asyncrl train --resume` continues the run without the notebook.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from asyncrl.errors import UserError
from asyncrl.user_functions import OUR_PACKAGES

FUTURE = "from __future__ import annotations\n"


def place_of(thing: Any, folder: Path) -> str:
    """Return `file.py:name` or `module:name` of a function or class, as the configuration names it. Source of what
    cannot be imported, as in a notebook, is written into the folder. Raises UserError for what has no source."""
    if isinstance(thing, str):
        return thing
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        raise UserError(f"{thing!r:.80} is {type(thing).__name__}. Give a function, a class, or its name file.py:name")
    name, module = thing.__name__, sys.modules.get(thing.__module__)
    if _is_importable(thing):
        file = getattr(module, "__file__", None)
        return f"{thing.__module__}:{name}" if "." in thing.__module__ or not file else f"{Path(file).resolve()}:{name}"
    source = _Module().whole(thing)
    file = folder / f"{name}-{xxhash.xxh3_64_hexdigest(source.encode())[:8]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return f"{file}:{name}"


def _is_importable(thing: Any) -> bool:
    """Whether another process finds the same object under its module's name."""
    module, name = getattr(thing, "__module__", None), _own_name(thing)
    return module != "__main__" and bool(name) and getattr(sys.modules.get(str(module)), name, None) is thing


def _own_name(thing: Any) -> str:
    """Name under which its module has it; empty for a value that has none."""
    return str(getattr(thing, "__name__", getattr(thing, "_name", None)) or "")


class _Module:
    """Text of a module: imports, values, and definitions in an order in which each finds what it needs."""

    def __init__(self) -> None:
        self._written: dict[str, Any] = {}
        """Meanings of the names that the module has so far."""
        self._lines: list[str] = []

    def whole(self, thing: Any) -> str:
        self._define(thing, thing.__name__)
        return FUTURE + "\n".join(self._lines) + "\n"

    def _define(self, thing: Any, user: str) -> None:
        """Write a function or class, behind all that it names."""
        if self._is_known(thing.__name__, thing, user):
            return
        if "<lambda>" in thing.__qualname__:
            raise UserError(f"{user} uses a lambda, which has no name. Define a function with `def`")
        source = _source_of(thing)
        values, tree = _values_of(thing), ast.parse(source)
        for name in sorted(_names_read(source)):
            if name in values:
                self._give(name, values[name], thing.__name__, tree)
            elif not hasattr(builtins, name):
                raise UserError(f"{thing.__name__} reads {name}, which is not defined. Define it before the run")
        for name in sorted(_names_in_annotations(tree) & values.keys()):
            with suppress(UserError):  # read by tools and dataclasses alone
                self._give(name, values[name], thing.__name__, tree)
        self._lines.append(f"\n\n{source.rstrip()}")

    def _give(self, name: str, value: Any, user: str, tree: ast.AST) -> None:
        """Write the import, the value or the definition behind a name that `user`, whose code is `tree`, reads."""
        plain = inspect.unwrap(value) if callable(value) else value  # such as a cached function's own
        if isinstance(value, ModuleType):
            if _is_local(value.__name__):
                raise UserError(
                    f"{user} reads the module {value.__name__}, a file beside this script, which no other process "
                    f"finds. Write {user} into a file, too, and give 'file.py:{user}'"
                )
            read = (value.__name__ + chain.removeprefix(name) for chain in _chains(tree, name))
            line = "\n".join([*(f"import {part}" for part in sorted({*read}) if part in sys.modules), ""])
            line += f"import {value.__name__} as {name}"
        elif _is_importable(value) and not _is_local(value.__module__):
            line = f"from {value.__module__} import {_own_name(value)} as {name}"
        elif inspect.isfunction(plain) or inspect.isclass(plain):
            self._define(value, user)
            if name == value.__name__:
                return
            line = f"{name} = {value.__name__}"
        elif isinstance(value, re.Pattern):
            line = f"import re\n{name} = re.compile({value.pattern!r}, {value.flags})"
        elif _is_plain(value):
            line = f"{name} = {value!r}"
        else:
            raise UserError(
                f"{user} reads {name}, which is {type(value).__name__} of this process. Make it within the function, "
                f"or write {user} into a file and give 'file.py:{user}'"
            )
        if not self._is_known(name, value, user):
            self._lines.append(line)

    def _is_known(self, name: str, value: Any, user: str) -> bool:
        """Whether the name is written already; from now on it is. Raises UserError where it means something else."""
        known = self._written.setdefault(name, self)
        if known is self:
            self._written[name] = value
        elif known is not value and not (_is_plain(known) and known == value):
            raise UserError(f"{user} reads {name}, which means something else in a function that it calls. Rename one")
        return known is not self


def _source_of(thing: Any) -> str:
    """Source of a function with its decorators, or of a class. Raises UserError where Python does not have it."""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError) as problem:
        if inspect.isclass(thing):  # of a notebook, before Python 3.13: its cells are searched, the newest first
            for lines in (linecache.getlines(file) for file in reversed([*linecache.cache])):
                with suppress(SyntaxError):
                    for node in ast.parse("".join(lines)).body:
                        if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                            return "".join(lines[first - 1 : node.end_lineno])
        raise UserError(
            f"the source of {thing.__qualname__} is not known ({problem}). Write it into a file and give "
            f"'file.py:{thing.__name__}'"
        ) from None


def _values_of(thing: Any) -> Mapping[str, Any]:
    """Values of the names around a function or class."""
    if inspect.isclass(thing):
        methods = [inspect.unwrap(value) for value in vars(thing).values() if inspect.isfunction(value)]
        around = vars(sys.modules[thing.__module__])
        return {**around, **{name: value for method in methods for name, value in _closure(method).items()}}
    function = inspect.unwrap(thing)
    return {**function.__globals__, **_closure(function)}


def _closure(function: Any) -> Mapping[str, Any]:
    return {k: v for k, v in inspect.getclosurevars(function).nonlocals.items() if k != "__class__"}


def _names_read(source: str) -> set[str]:
    """Names that a definition takes from around it, Python's own among them."""

    def read(table: symtable.SymbolTable, *, is_top: bool) -> set[str]:
        names = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if (symbol.is_referenced() and not symbol.is_assigned() if is_top else symbol.is_global())
        }
        return names.union(*(read(child, is_top=False) for child in table.get_children()))

    top = symtable.symtable(FUTURE + source, "<source>", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    return {name for name in read(top, is_top=True) - own if not name.startswith("__")}


def _names_in_annotations(tree: ast.AST) -> set[str]:
    given = [getattr(node, part, None) for node in ast.walk(tree) for part in ("annotation", "returns")]
    return {node.id for each in given if each for node in ast.walk(each) if isinstance(node, ast.Name)}


def _chains(tree: ast.AST, name: str) -> set[str]:
    """Dotted names in the code that begin with a name, such as xml.etree.ElementTree."""
    return {
        text
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (text := ast.unparse(node)).startswith(f"{name}.")
    }


def _is_local(module: str) -> bool:
    """Whether a module lies beside the caller's script or in its working directory: workers look elsewhere."""
    top = sys.modules.get(module.partition(".")[0])
    file = getattr(top, "__file__", None)
    if file is None or top is None or top.__name__ in (*OUR_PACKAGES, *sys.stdlib_module_names):
        return False
    folder = Path(file).resolve().parent
    folder = folder.parent if hasattr(top, "__path__") else folder
    return folder in {Path.cwd().resolve(), Path(sys.path[0] or ".").resolve()}


def _is_plain(value: Any) -> bool:
    """Whether the value is what its text says: numbers, texts, and lists and dicts of them."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
