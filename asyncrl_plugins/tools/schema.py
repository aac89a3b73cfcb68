"""From a typed function with a docstring to a tool: its JSON schema, and the check of arguments before a call.

    def crop(box: tuple[float, float, float, float], image: int = 0, *, ctx: ToolContext) -> Image:
        \"\"\"Show a part of an image larger.

        box: left, top, right, bottom as fractions of the image.
        image: number of the image, 0 is the first one.
        \"\"\"

A parameter `ctx` is hidden from the policy. Parameters are int, float, str, bool, Literal, list[T], tuple[T, T],
dict[str, T], `T | None` and pydantic models; each has its line in the docstring (`Args:` above them is allowed).
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from asyncrl.environments.interface import ToolError
from asyncrl.errors import UserError, did_you_mean
from asyncrl.user_functions import one_line, shorten

HIDDEN = "ctx"
MOST_PROBLEMS = 4
"""Problems of one call that the policy is told."""
SCALARS = (int, float, str, bool)
_DESCRIBED = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s+(\S.*)")
_SECTIONS = ("args", "arguments", "parameters")
_LAST_SECTIONS = ("returns", "raises", "yields", "example", "examples", "note")


@dataclass(frozen=True)
class Tool:
    """A function that the policy can call. Made by `tool_of`, or by an adapter, which has no function to look at."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object."""
    function: Callable[..., Any] | None = None
    arguments: type[BaseModel] | None = None
    """Validates the arguments; None where another process does."""
    takes_context: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Schema in the form that chat templates take."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the function takes them. Raises ToolError naming the parameter and what is wrong with it."""
        if self.arguments is None:
            return dict(arguments)
        try:
            valid = self.arguments.model_validate_json(json.dumps(arguments), strict=True)
        except ValidationError as error:
            problems = (_problem(detail, self.parameters["properties"]) for detail in error.errors())
            shown = list(islice(problems, MOST_PROBLEMS))
            more = f"; and {error.error_count() - len(shown)} more" if error.error_count() > len(shown) else ""
            raise ToolError(f"{self.name}: {'; '.join(shown)}{more}") from None
        return {name: getattr(valid, name) for name in type(valid).model_fields}


def tool_of(function: Callable[..., Any]) -> Tool:
    """The tool of a function, or of a bound method. Raises UserError, with the line, where it has no schema."""
    is_method = inspect.ismethod(function)
    return replace(_described_once(function.__func__ if is_method else function, is_method), function=function)


@cache
def _described_once(function: Callable[..., Any], is_method: bool) -> Tool:
    """The tool without its function: each trajectory binds its own, and a schema takes milliseconds."""
    name = function.__name__
    place = _place(function)
    parameters = dict(list(inspect.signature(function).parameters.items())[is_method:])
    described = _descriptions(inspect.getdoc(function) or "", parameters)
    if not described[""]:
        raise UserError(f"{place}: tool {name} has no docstring. Say in its first line what it does")
    hints = _hints(function, [key for key in parameters if key != HIDDEN], place, name)
    fields: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if key == HIDDEN:
            continue
        problem = _parameter_problem(key, parameter, hints, described)
        if problem:
            raise UserError(f"{place}: tool {name}: {problem}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[key] = (hints[key], Field(default, description=described[key]))
    strict = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    try:
        arguments = create_model(f"{name}_arguments", __config__=strict, **fields)
        schema = _without_titles(arguments.model_json_schema())
    except Exception as error:  # of a user's pydantic model that has no JSON schema
        raise UserError(f"{place}: tool {name} has no JSON schema: {one_line(error)}") from error
    schema.setdefault("properties", {})
    schema.pop("additionalProperties", None)
    return Tool(name, described[""], schema, None, arguments, HIDDEN in parameters)


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Raises UserError for two tools of one name."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise UserError(f"two tools have the name {tool.name!r}: rename one, or leave it out")
        named[tool.name] = tool
    return named


def unknown_tool(name: str, tools: Iterable[str]) -> str:
    known = list(tools)
    return f"there is no tool {name!r:.80}.{did_you_mean(name, known)} Tools: {', '.join(known) or 'none'}"


def _parameter_problem(
    key: str, parameter: inspect.Parameter, hints: Mapping[str, Any], described: Mapping[str, str]
) -> str:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        return f"parameter {key!r} is {parameter.kind.description}. Tools are called with named arguments only"
    if key not in hints:
        return f"parameter {key!r} has no annotation. Write its type, such as `{key}: int`"
    unsupported = _unsupported(hints[key])
    if unsupported:
        return (
            f"parameter {key!r} has the annotation {unsupported}, of which there is no JSON. Use int, float, str, "
            "bool, Literal, list[T], tuple[T, T], dict[str, T], `T | None` or a pydantic model"
        )
    if key not in described:
        return f"parameter {key!r} has no description. Add a line `{key}: ...` to the docstring"
    return ""


def _unsupported(annotation: Any) -> str:
    """The part of an annotation that cannot be a parameter, as text; empty where all of it can."""
    if annotation in SCALARS or annotation is type(None):
        return ""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "" if all(isinstance(part, str | int | bool) for part in parts) else str(annotation)
    if origin is dict and parts and parts[0] is not str:
        return str(annotation)
    if origin is tuple:
        parts = tuple(part for part in parts if part is not Ellipsis)
    if origin in (list, tuple, dict, typing.Union, types.UnionType) and parts:
        return next(filter(None, map(_unsupported, parts)), "")
    return getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)  # type: ignore[return-value]


def _hints(function: Callable[..., Any], names: Sequence[str], place: str, name: str) -> dict[str, Any]:
    """Types of the parameters; those of `ctx` and of the result need not be importable."""
    source: Any = inspect.unwrap(function)
    wanted = {key: value for key, value in source.__annotations__.items() if key in names}
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__=wanted), source.__globals__)
    except Exception as error:
        raise UserError(f"{place}: tool {name}: its annotations cannot be read: {one_line(error)}") from error


def _descriptions(docstring: str, names: Container[str]) -> dict[str, str]:
    """Descriptions in a docstring: of the tool, under an empty name, and of each parameter."""
    found: dict[str, list[str]] = {"": []}
    current, ended = "", False
    for line in docstring.splitlines():
        text = line.strip()
        heading = text.rstrip(":").lower() if text.endswith(":") else ""
        match = _DESCRIBED.fullmatch(text)
        if heading in _SECTIONS or heading in _LAST_SECTIONS:
            ended, current = heading in _LAST_SECTIONS, ""
        elif ended:
            continue
        elif match and match[1] in names:
            current = match[1]
            found[current] = [match[2]]
        elif not text:
            current = ""
        elif current or len(found) == 1:
            found[current].append(text)
    return {name: " ".join(lines) for name, lines in found.items()}


def _without_titles(schema: Any) -> Any:
    """A schema as policies see it: pydantic's titles repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or isinstance(value, dict)}
    return {key: _without_titles(value) for key, value in kept.items()}


def _problem(detail: Any, known: Iterable[str]) -> str:
    """One error of validation, for the policy to learn from."""
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"parameter {path!r} is missing"
    if detail["type"] == "extra_forbidden":
        return f"there is no parameter {path!r:.80}.{did_you_mean(path, known)}"
    given = shorten(json.dumps(detail["input"], ensure_ascii=False, default=str), 80)
    return f"parameter {path!r} is {given}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _place(function: Callable[..., Any]) -> str:
    source: Any = inspect.unwrap(function)
    code = getattr(source, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
