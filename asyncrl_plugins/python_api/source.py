"""Functions and classes of a notebook or script, written as a file that worker processes load as any other.

Source travels, no object: what the function names is written with it. So the run's journal hashes and records it as a
file's, a server that starts again finds it, and `asyncrl train --resume` continues the run without the notebook.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from asyncrl.errors import UserError

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
    module, name = getattr(thing, "__module__", None), getattr(thing, "__name__", getattr(thing, "_name", None))
    found = sys.modules.get(str(module))
    return module != "__main__" and bool(name) and getattr(found, str(name), None) is thing


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
        try:
            source = textwrap.dedent(inspect.getsource(thing))
            ast.parse(source)
        except (OSError, TypeError, SyntaxError) as problem:
            raise UserError(
                f"the source of {thing.__qualname__} is not known ({problem}). Write it into a file and give "
                f"'file.py:{thing.__name__}'"
            ) from None
        if "<lambda>" in thing.__qualname__:
            raise UserError(f"{user} uses a lambda, which has no name. Define a function with `def`")
        values = _values_of(thing)
        for name in sorted(_names_read(source) & values.keys()):
            self._give(name, values[name], thing.__name__)
        self._lines.append(f"\n\n{source.rstrip()}")

    def _give(self, name: str, value: Any, user: str) -> None:
        """Write the import, the value or the definition behind a name that `user` reads."""
        if isinstance(value, ModuleType):
            line = f"import {value.__name__} as {name}"
        elif _is_importable(value):
            line = f"from {value.__module__} import {getattr(value, '__name__', None) or value._name} as {name}"
        elif inspect.isfunction(value) or inspect.isclass(value):
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


def _values_of(thing: Any) -> Mapping[str, Any]:
    """Values of the names around a function or class."""
    if inspect.isclass(thing):
        methods = [value for value in vars(thing).values() if inspect.isfunction(value)]
        around = methods[0].__globals__ if methods else vars(sys.modules[thing.__module__])
        return {**around, **{name: value for method in methods for name, value in _closure(method).items()}}
    return {**thing.__globals__, **_closure(thing)}


def _closure(function: Any) -> Mapping[str, Any]:
    return {k: v for k, v in inspect.getclosurevars(function).nonlocals.items() if k != "__class__"}


def _names_read(source: str) -> set[str]:
    """Names that a definition takes from around it: not its own, nor Python's."""

    def read(table: symtable.SymbolTable, *, is_top: bool) -> set[str]:
        names = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if (symbol.is_referenced() and not symbol.is_assigned() if is_top else symbol.is_global())
        }
        return names.union(*(read(child, is_top=False) for child in table.get_children()))

    return read(symtable.symtable(FUTURE + source, "<source>", "exec"), is_top=True) - {*dir(builtins)}


def _is_plain(value: Any) -> bool:
    """Whether the value is what its text says: numbers, texts, and lists and dicts of them."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
