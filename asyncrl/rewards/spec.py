"""From `reward.functions` in the configuration to functions, with mistakes found before anything starts."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asyncrl.errors import UserError
from asyncrl.rewards.builtin import BUILTIN_REWARDS

if TYPE_CHECKING:
    from asyncrl.config.sections import RewardConfig

MAX_MESSAGE_CHARS = 600


def load_reward(function: str) -> Callable[..., Any]:
    """The function of a built-in name or `path/file.py:function`. Runs the file: use it in workers.

    Raises UserError for an unknown name, a missing file or function, and a file that cannot be imported.
    """
    located = locate(function)
    if located is None:
        return BUILTIN_REWARDS[function]
    path, name = located
    return function_of(load_module(path, read_source(path)), name)


def check_rewards(config: RewardConfig) -> None:
    """Raise UserError for every mistake that can be seen without running the user's files.

    `RewardPool.start` goes further: it loads them in its workers.
    """
    for component in config.functions:
        located = locate(component.function)
        if located is None:
            check_call(BUILTIN_REWARDS[component.function], component.function, component.kwargs)
        else:
            path, name = located
            _check_defines(path, name, read_source(path))


def locate(function: str) -> tuple[Path, str] | None:
    """Absolute file and function name, or None for a known built-in."""
    path_text, colon, name = function.rpartition(":")
    if not colon:
        if function in BUILTIN_REWARDS:
            return None
        if function.endswith(".py"):
            raise UserError(f"reward function {function!r} names a file only. Write {function}:function_name")
        raise UserError(
            f"there is no built-in reward {function!r}.{_near(function, BUILTIN_REWARDS)} "
            f"Built-in are {', '.join(BUILTIN_REWARDS)}; your own is path/file.py:function"
        )
    path = Path(path_text).expanduser().absolute()
    if not path_text.endswith(".py") or not name.isidentifier():
        raise UserError(f"reward function {function!r} is not of the form path/file.py:function")
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"reward file {path} does not exist (from {function!r}).{_near(path.name, siblings)}")
    return path, name


def read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"reward file {path} cannot be read: {error.strerror}") from error


def load_module(path: Path, source: bytes) -> ModuleType:
    """Run the file's source as a module, with its folder importable as for a script."""
    module = ModuleType(f"reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}")
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[module.__name__] = module  # dataclasses and typing look their module up
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UserError(f"reward file {path} cannot be imported: {one_line(error, str(path))}") from error
    return module


def function_of(module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise _missing_function(str(module.__file__), name, functions)
    if not callable(function):
        raise UserError(f"{name} in reward file {module.__file__} is {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise _async_function(str(module.__file__), name)
    return function


def check_call(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> None:
    """Raise UserError if `function(sample, **kwargs)` cannot be called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        near = "".join(_near(key, known) for key in kwargs if key not in known)
        raise UserError(
            f"reward {name}{signature} cannot be called with a sample and kwargs {kwargs}: {error}.{near}"
        ) from error


def _check_defines(path: Path, name: str, source: bytes) -> None:
    """Raise UserError if the source does not name the function. Only running the file can tell whether it has one."""
    try:
        body = ast.parse(source, str(path)).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"reward file {path} cannot be imported: {one_line(error)}") from error
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in body):
        raise _async_function(str(path), name)
    if not re.search(rf"(?<!\w)({name}(?!\w)|import \*)", source.decode(errors="replace")):
        raise _missing_function(str(path), name, [node.name for node in body if isinstance(node, ast.FunctionDef)])


def _missing_function(path: str, name: str, functions: Iterable[str]) -> UserError:
    has = ", ".join(list(functions)[:10]) or "no functions"
    return UserError(f"reward file {path} has no function {name!r}.{_near(name, functions)} It has {has}")


def _async_function(path: str, name: str) -> UserError:
    return UserError(f"{name} in reward file {path} is async. A reward is a plain function: `def {name}`")


def _near(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def one_line(error: BaseException, own_file: str = "") -> str:
    """Error, file and line in bounded text: `ZeroDivisionError: division by zero (my_reward.py:12 in reward)`.

    own_file is the user's file: where the error was raised deeper down, its last line there is named too.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # an exception class of the user whose __str__ fails
        text = f"(its own text failed with {type(broken).__name__})"
    name = type(error).__name__
    shown = shorten(f"{name}: {text}" if text else name)
    place = _place(error, own_file)
    return f"{shown} ({place})" if place else shown


def shorten(text: str, limit: int = MAX_MESSAGE_CHARS // 2) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]}... ({len(text)} chars)"


def _place(error: BaseException, own_file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    # No frame may live on, as after a MemoryError its locals must go; no line is read, as its file may have changed.
    frames = list(traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False))
    if not frames:
        return ""
    own = [frame for frame in frames if frame.filename == own_file]
    raised = _show(frames[-1])
    return shorten(f"{_show(own[-1])}, raised in {raised}" if own and own[-1] != frames[-1] else raised)


def _show(frame: traceback.FrameSummary) -> str:
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return place if frame.name == "<module>" else f"{place} in {frame.name}"
