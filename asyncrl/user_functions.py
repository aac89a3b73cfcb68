"""Functions of the user, where a setting also takes the name of a built-in.

`path/to/file.py:function`, or `package.module:function` of what is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import xxhash

from asyncrl.errors import METHOD_OVERLAYS, UserError, did_you_mean, file_hint
from asyncrl.plugins import Group, descriptions, what_to_install

F = TypeVar("F", bound=Callable[..., object])
OUR_PACKAGES = ("asyncrl", "asyncrl_plugins", "learner", "protocol", "rollout_server")
"""Packages of the objects that user functions get."""
MAX_MESSAGE_CHARS = 300
MODULE = re.compile(r"(?!.*[.]py$)[A-Za-z_]\w*([.][A-Za-z_]\w*)*")


class UserFunction(NamedTuple):
    path: Path
    """Absolute."""
    name: str
    package: str = ""
    """Package that `from . import` begins in a file that was named as a module; empty for one that was named by its
    path."""


def resolve(name: str, builtins: Mapping[str, F], setting: str, *, may_be_async: bool = False) -> F:
    """The built-in of this name, or the user's function, whose file is run. UserErrors name the `setting`."""
    located = locate(name, builtins, setting)
    return builtins[name] if located is None else load(located, may_be_async=may_be_async)


def load(function: UserFunction, *, may_be_async: bool = False) -> Any:
    """The function itself. Runs its file."""
    module = load_module(function.path, read_source(function.path), function.package)
    return function_of(module, function.name, may_be_async=may_be_async)


def locate(name: str, builtins: Collection[str], setting: str, group: Group | None = None) -> UserFunction | None:
    """File and name of the user's function, or None for a built-in. Plug-ins of `group` may bring other names."""
    if name in builtins:
        return None
    file, colon, function = name.rpartition(":")
    if not colon:
        raise UserError(f"{setting} is {name!r}, which is {what_it_may_be(name, builtins, setting, group)}")
    path = Path(file).expanduser().absolute()
    if MODULE.fullmatch(file) and not path.exists():
        source = _module_file(file, function, f"{setting} is {name!r}, but")
        return UserFunction(source, function, package=file.rpartition(".")[0])
    if not path.is_file():
        raise UserError(f"{setting} is {name!r}, but there is no file {path}: {file_hint(path)}")
    return UserFunction(path, function)


def what_it_may_be(name: str, builtins: Collection[str], setting: str, group: Group | None = None) -> str:
    """The rest of a sentence about a name that nothing has: `a file`, `a whole method`, or what may be meant."""
    file = Path(name).expanduser()
    kind = "class" if setting in ("environment.name", "telemetry.trackers") else "function"
    if name.endswith(".py") and file.is_file():
        node_type = ast.ClassDef if kind == "class" else ast.FunctionDef
        try:
            there = [node.name for node in ast.parse(read_source(file)).body if isinstance(node, node_type)]
        except (SyntaxError, ValueError):
            there = []
        has = f"it has {', '.join(there)}" if there else f"no {kind} is found in it"
        return f"a file. Add the {kind}'s name, {name}:{kind.upper()}; {has}"
    if setting.startswith("algorithm.") and _is_method_word(name):
        return (
            f"a whole method, of several keys. Write the word `{name}` behind the configuration, without `=`. "
            f"There are {', '.join(builtins)} here"
        )
    there = f"There are {', '.join(builtins)}; your own" if builtins else "Your own"
    return f"unknown.{did_you_mean(name, builtins)} {there} is path/to/file.py:{kind} or package.module:{kind}" + (
        f". {what_to_install(group)}" if group else ""
    )


def _is_method_word(name: str) -> bool:
    """Whether the name is the word for a whole method (`find_overlay`), not the value of a key."""
    folders = [METHOD_OVERLAYS, *(each.overlays for each in descriptions("methods").values())]
    return name.isidentifier() and any(folder and (folder / f"{name}.yaml").is_file() for folder in folders)


def _module_file(module: str, function: str, but: str) -> Path:
    """Source of a module that Python finds, which is not run; the packages that it lies in are."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"{but} a package of it cannot be imported: {one_line(error)}") from error
        spec = None
    except (Exception, SystemExit) as error:
        raise UserError(f"{but} a package of it cannot be imported: {one_line(error)}") from error
    if spec is None:
        path = Path(f"{module.replace('.', '/')}.py")
        example = path if path.is_file() else "path/to/file.py"
        raise UserError(
            f"{but} Python finds no module {module}.{_similar_module(module)} "
            f"A file that is not installed is named by its path: {example}:{function}"
        )
    if spec.submodule_search_locations is not None:
        raise UserError(f"{but} {module} is a package: name the module in it that has {function!r}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(f"{but} {module} is no Python source that could be loaded ({spec.origin})")
    return Path(spec.origin).absolute()


def _similar_module(module: str) -> str:
    """A sentence with the most similar module of the package, after a space; empty if there is none."""
    package, _, name = module.rpartition(".")
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (Exception, SystemExit):  # it has no such package either
        return ""
    places = spec.submodule_search_locations if spec else None
    return did_you_mean(name, [found.name for found in pkgutil.iter_modules(places)]) if places else ""


def own_functions(choices: Iterable[tuple[str, str, Collection[str]]]) -> Iterator[UserFunction]:
    """Yield each function that is the user's own, as `locate` does.

    `choices` are setting, value and names of the built-ins, as `AlgorithmConfig.functions` has them.
    """
    for setting, name, builtins in choices:
        located = locate(name, builtins, setting)
        if located is not None:
            yield located


def read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def source_fingerprint(function: UserFunction) -> str:
    """Hash of the file and of those that it imports from its folder or package, which are read, not run.

    Raises UserError for a file that cannot be read.
    """
    hashed = xxhash.xxh3_64()
    for _, source in sorted(_sources(function).items()):
        hashed.update(source)
    return hashed.hexdigest()


def imported_files(function: UserFunction) -> dict[Path, str]:
    """Files that the function's own imports from its folder or package, with their hashes. Raises UserError."""
    sources = _sources(function)
    return {path: xxhash.xxh3_64_hexdigest(source) for path, source in sources.items() if path != function.path}


def hashes_of(files: Iterable[Path]) -> dict[Path, str]:
    """Hash of each file's contents; empty where there is no file."""
    return {path: xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.is_file() else "" for path in files}


def _sources(function: UserFunction) -> dict[Path, bytes]:
    package = function.package.split(".") if function.package else []
    root = function.path.parents[len(package)]
    own = root.joinpath(*package[:1])
    sources: dict[Path, bytes] = {}
    waiting = [function.path]
    while waiting:
        path = waiting.pop()
        if path not in sources and path.is_relative_to(own):
            sources[path] = read_source(path)
            waiting += _imported_files(path, sources[path], root)
    return sources


def _imported_files(path: Path, source: bytes, root: Path) -> Iterator[Path]:
    """Yield the files below `root` that a source names in its imports."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        names, base = list[str](), root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else root
            names = [".".join(filter(None, (node.module, *more))) for more in ((), *((a.name,) for a in node.names))]
        for name in names:
            if name.partition(".")[0] in ("", "asyncrl", "asyncrl_plugins"):  # a clone of ours is no part of a reward
                continue
            module = base.joinpath(*name.split("."))
            yield from (file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file())


def load_module(path: Path, source: bytes, package: str = "") -> ModuleType:
    """Run the file's source as a module: of its `package`, or with its folder importable as for a script."""
    module = ModuleType(f"plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}")
    module.__file__, module.__package__ = str(path), package or None
    if not package and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[module.__name__] = module  # dataclasses and typing look their module up
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UserError(f"{path} cannot be imported: {one_line(error, str(path))}") from error
    return module


def function_of(module: ModuleType, name: str, *, may_be_async: bool = False) -> Any:
    function = getattr(module, name, None)
    if function is None:
        there = [key for key, value in vars(module).items() if _is_offered(value, module)]
        has = ", ".join(there[:10]) or "neither functions nor classes"
        raise UserError(f"{module.__file__} has no function {name!r}.{did_you_mean(name, there)} It has {has}")
    if not callable(function):
        raise UserError(f"{name} in {module.__file__} is {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise UserError(f"{name} in {module.__file__} is async. Write a plain function: `def {name}`")
    return function


def _is_offered(value: Any, module: ModuleType) -> bool:
    """Whether a setting may name it: a function, or a class of the file's own, not one that it imports."""
    return inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__)


def one_line(error: BaseException, own_file: str = "") -> str:
    """Error, file and line in bounded text: `ZeroDivisionError: division by zero (my_reward.py:12 in reward)`.

    The place is the last one in own_file, the user's, or where the error was raised if it has none there.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # an exception class of the user whose __str__ fails
        text = f"(its own text failed with {type(broken).__name__})"
    name, place = type(error).__name__, _place(error, own_file)
    text += _attributes(error)
    return shorten(f"{name}: {text}" if text else name) + (f" ({place})" if place else "")


def _attributes(error: BaseException) -> str:
    """Sentences with the public attributes of an object of ours that lacks one; empty for other errors."""
    if not isinstance(error, AttributeError) or type(error.obj).__module__.partition(".")[0] not in OUR_PACKAGES:
        return ""
    lacking = type(error.obj)
    names = {**getattr(lacking, "__dataclass_fields__", {}), **vars(lacking)}  # fields first, in their order
    there = [name for name in names if not name.startswith("_")]
    return f".{did_you_mean(str(error.name), there)} It has {', '.join(there)}" if there else ""


def shorten(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]}... ({len(text)} chars)"


def storable(text: str) -> str:
    """Escape lone surrogates, which neither the wire nor SQLite takes."""
    return text.encode(errors="backslashreplace").decode()


def _place(error: BaseException, own_file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    # No frame may live on, as after a MemoryError its locals must go; no line is read, as its file may have changed.
    frames = list(traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False))
    if not frames:
        return ""
    frame = next((frame for frame in reversed(frames) if frame.filename == own_file), frames[-1])
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return place if frame.name == "<module>" else f"{place} in {frame.name}"
