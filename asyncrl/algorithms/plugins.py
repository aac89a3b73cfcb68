"""`file.py:function` becomes the function; a short name is looked up in a dict of built-ins."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from asyncrl.errors import UserError

F = TypeVar("F", bound=Callable[..., object])


def resolve(name: str, builtins: Mapping[str, F], setting: str) -> F:
    """The built-in of this name, or the function at `path/to/file.py:function`. `setting` is named in errors."""
    if name in builtins:
        return builtins[name]
    path, separator, function = name.rpartition(":")
    if not separator:
        near = difflib.get_close_matches(name, builtins, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"{setting} is {name!r}, which is no built-in. {hint}Built-ins: {', '.join(sorted(builtins))}; "
            "your own: path/to/file.py:function"
        )
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{setting} is {name!r}, but there is no file {path!r} in {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{setting}: {path} could not be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"{setting} is {name!r}, but {path} has no function {function!r}")
    return getattr(module, function)
