"""Call formats: from the text of one turn to calls of tools, or to an error with its position. Nothing is evaluated,
nothing is repaired.

    hermes      <tool_call>{"name": "crop", "arguments": {"row": 1}}</tool_call>; several blocks are several calls
    qwen_xml    <tool_call><function=crop><parameter=row>1</parameter></function></tool_call>; the schema types values
    tool_call   either of these two in each block: prompts ask for the one that the model's chat template asks for, else
                for JSON
    tag:search  <search>text</search>: the only argument, a string, of the tool `search`
    python      a fenced block of python, or <code>...</code>: the argument of the tool `python`
    plain       one line, `crop 1 2`: a tool's name and its arguments in order
    none        no calls

Text that a policy thinks (up to `</think>`) is not looked at. A turn that was cut by its length has no calls.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.environments.interface import Action
from asyncrl.errors import UserError, did_you_mean
from asyncrl.user_functions import shorten
from asyncrl_plugins.tools.schema import Tool
from protocol.nesting import read_json

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""
FORMATS = ("tool_call", "hermes", "qwen_xml", "tag:<name>", "python", "plain", "none")
PYTHON = "python"
"""Name of the tool that the format `python` calls."""

EXPECTED = '{"name": ..., "arguments": {...}}'
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_CODE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```|<code>(.*?)</code>", re.DOTALL)
_CODE_OPENS = re.compile(r"```(?:python|py)[ \t]*\n|<code>")


@dataclass(frozen=True)
class Call:
    """One call in a turn, as the policy wrote it."""

    id: str
    """Index among the calls of its turn, from `0`."""
    name: str
    """Name of the tool; empty where the text did not get as far."""
    arguments: dict[str, Any]
    """Arguments by parameter name, not validated yet; empty where there is an error."""
    error: str = ""
    """Reason why the text is no call, with the position: an observation for the model."""


@dataclass(frozen=True)
class CallReader:
    """Calls of given tools in a given format."""

    call_format: str
    schemas: Schemas

    @classmethod
    def of(cls, config: Any, own_format: str, tools: Iterable[Tool]) -> CallReader:
        """Calls by `environment.config.call_format`; where it is auto, in a class's own format, or none without tools.
        Raises UserError for a format that there is not, or that cannot express these tools."""
        schemas = {tool.name: tool.parameters for tool in tools}
        wish = getattr(config, "call_format", "auto")
        call_format = wish if wish != "auto" else own_format if schemas else "none"
        check_format(call_format, schemas)
        return cls(call_format, schemas)

    def calls(self, action: Action) -> tuple[Call, ...]:
        return parse_calls(self.call_format, action.text, self.schemas)


class _Malformed(Exception):
    def __init__(self, position: int, problem: str, name: str = "") -> None:
        super().__init__(f"malformed call at character {position}: {problem}")
        self.name = name


def check_format(call_format: str, schemas: Schemas) -> None:
    """Raise UserError for a format that there is not, or that cannot express these tools."""
    kind, _, name = call_format.partition(":")
    if kind not in _PARSERS or (kind == "tag") != bool(name):
        raise UserError(
            f"environment.config.call_format is {call_format!r}.{did_you_mean(call_format, FORMATS)} "
            f"There are {', '.join(FORMATS)}"
        )
    wanted = {"tag": name, "python": PYTHON}.get(kind)
    if wanted is not None:
        if wanted not in schemas:
            raise UserError(
                f"environment.config.call_format is {call_format}, but there is no tool {wanted!r}. "
                f"Tools: {', '.join(schemas) or 'none'}"
            )
        if [part.get("type") for part in schemas[wanted].get("properties", {}).values()] != ["string"]:
            raise UserError(
                f"environment.config.call_format {call_format} needs a tool {wanted!r} with one argument, a string"
            )
    if kind == "plain":
        for tool, schema in schemas.items():
            for parameter, part in schema.get("properties", {}).items():
                if not _is_word(part):
                    raise UserError(
                        f"environment.config.call_format is plain, but {parameter!r} of tool {tool} is not one word. "
                        "Use hermes, or give the tool parameters of str, int, float or bool"
                    )


def parse_calls(call_format: str, text: str, schemas: Schemas) -> tuple[Call, ...]:
    """The calls in a turn's text. A Call with an `error` is one that the policy has not written right."""
    kind, _, name = call_format.partition(":")
    thought = text.rfind("</think>")
    if thought < 0 and "<think>" in text:
        return ()
    start = 0 if thought < 0 else thought + len("</think>")
    calls: list[Call] = []
    try:
        for tool, arguments in _PARSERS[kind](text, start, schemas, name):
            if isinstance(arguments, _Malformed):
                calls.append(Call(str(len(calls)), tool, {}, str(arguments)))
            else:
                calls.append(Call(str(len(calls)), tool, arguments))
    except _Malformed as error:  # of which nothing behind it can be read either
        calls.append(Call(str(len(calls)), error.name, {}, str(error)))
    return tuple(calls)


def example_call(call_format: str, schemas: Schemas) -> str:
    """A call of the first tool as the format writes it, with made-up values; empty where there are no calls."""
    kind, _, name = call_format.partition(":")
    if kind == "none" or not schemas:
        return ""
    tool = {"tag": name, "python": PYTHON}.get(kind, next(iter(schemas)))
    properties = schemas[tool].get("properties", {})
    needed = schemas[tool].get("required", list(properties))
    values = {key: _example(part, schemas[tool]) for key, part in properties.items() if key in needed}
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    match kind:
        case "qwen_xml":
            inner = "".join(f"<parameter={key}>{word}</parameter>" for key, word in words.items())
            return f"{_OPEN}<function={tool}>{inner}</function>{_CLOSE}"
        case "tag":
            return f"<{name}>{''.join(words.values())}</{name}>"
        case "python":
            return "<code>print(1)</code>"
        case "plain":
            return shlex.join([tool, *words.values()])
        case _:
            return f"{_OPEN}{json.dumps({'name': tool, 'arguments': values})}{_CLOSE}"


def _example(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    """A value that a part of a tool's schema takes, but for bounds that it may have beside its type."""
    if "$ref" in part:
        part = schema.get("$defs", {}).get(str(part["$ref"]).rpartition("/")[2], {})
    for known in ("examples", "enum"):
        if part.get(known):
            return part[known][0]
    if "anyOf" in part:
        return _example(part["anyOf"][0], schema)
    match part.get("type"):
        case "integer":
            return part.get("minimum", 0)
        case "number":
            return part.get("minimum", 0.5)
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            items = part.get("prefixItems") or [part.get("items", {})] * max(1, part.get("minItems", 1))
            return [_example(item, schema) for item in items]
        case "object":
            properties = part.get("properties", {})
            return {key: _example(properties[key], schema) for key in part.get("required", ()) if key in properties}
        case _:
            return "text"


Found = tuple[str, dict[str, Any] | _Malformed]


def _in_blocks(
    text: str, start: int, schemas: Schemas, read: Callable[[int, str, Schemas], tuple[str, dict[str, Any]]]
) -> Iterator[Found]:
    for position, inner in _blocks(text, start):
        try:
            yield read(position, inner, schemas)
        except _Malformed as error:
            yield error.name, error


def _tool_call(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    def read(position: int, inner: str, schemas: Schemas) -> tuple[str, dict[str, Any]]:
        is_xml = inner.lstrip().startswith("<function")
        return (_qwen_xml_call if is_xml else _hermes_call)(position, inner, schemas)

    return _in_blocks(text, start, schemas, read)


def _hermes(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    return _in_blocks(text, start, schemas, _hermes_call)


def _hermes_call(position: int, inner: str, schemas: Schemas) -> tuple[str, dict[str, Any]]:
    indent = len(inner) - len(inner.lstrip())
    called = _json(inner.strip(), position + indent)
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        raise _Malformed(position, f"expected {EXPECTED}")
    if not isinstance(called.get("arguments"), dict):
        there = "is no object" if "arguments" in called else "is missing"
        raise _Malformed(position, f'"arguments" {there}; expected {EXPECTED}', called["name"])
    other = [key for key in called if key not in ("name", "arguments")]
    if other:
        raise _Malformed(position, f"unknown key {other[0]!r:.80} beside name and arguments", called["name"])
    return called["name"], called["arguments"]


def _qwen_xml(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    return _in_blocks(text, start, schemas, _qwen_xml_call)


def _qwen_xml_call(position: int, inner: str, schemas: Schemas) -> tuple[str, dict[str, Any]]:
    function = _FUNCTION.fullmatch(inner)
    if function is None:
        raise _Malformed(position, "expected <function=NAME>...</function> and nothing else")
    tool, body, at = function[1], function[2], 0
    arguments: dict[str, Any] = {}
    while body[at:].strip():
        match = _PARAMETER.match(body, at)
        if match is None:
            where = position + function.start(2) + at
            raise _Malformed(where, "expected <parameter=NAME>value</parameter>", tool)
        if match[1] in arguments:
            raise _Malformed(position, f"parameter {match[1]!r:.80} is given twice", tool)
        arguments[match[1]] = _typed(match[2], _part(schemas, tool, match[1]))
        at = match.end()
    return tool, arguments


def _tag(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    argument = next(iter(schemas[name]["properties"]))
    for _, inner in _blocks(text, start, f"<{name}>", f"</{name}>", name):
        yield name, {argument: inner.strip()}


def _python(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    argument, at = next(iter(schemas[PYTHON]["properties"])), start
    while opened := _CODE_OPENS.search(text, at):
        block = _CODE.match(text, opened.start())
        if block is None:
            raise _Malformed(opened.start(), "the block of code is not closed", PYTHON)
        yield PYTHON, {argument: block[1] if block[1] is not None else block[2].strip("\n")}
        at = block.end()


def _plain(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    line = text[start:].strip()
    position = start + len(text[start:]) - len(text[start:].lstrip())
    tool = line.split(maxsplit=1)[0] if line else ""
    if tool not in schemas:
        return
    if "\n" in line:
        raise _Malformed(position + line.index("\n"), "a call is one line", tool)
    try:
        words = shlex.split(line)[1:]
    except ValueError as error:
        raise _Malformed(position, str(error).lower(), tool) from None
    names = list(schemas[tool].get("properties", {}))
    if len(words) > len(names):
        shown = " ".join([tool, *(key.upper() for key in names)])
        raise _Malformed(position, f"{len(words)} arguments, expected `{shown}`", tool)
    yield tool, {key: _typed(word, _part(schemas, tool, key)) for key, word in zip(names, words, strict=False)}


def _none(text: str, start: int, schemas: Schemas, name: str) -> Iterator[Found]:
    return iter(())


_PARSERS: dict[str, Callable[[str, int, Schemas, str], Iterator[Found]]] = {
    "tool_call": _tool_call,
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "tag": _tag,
    "python": _python,
    "plain": _plain,
    "none": _none,
}


def _blocks(
    text: str, start: int, opens: str = _OPEN, closes: str = _CLOSE, name: str = ""
) -> Iterator[tuple[int, str]]:
    """Position and text of what stands between each pair of tags. Raises _Malformed for one that is not closed."""
    while (opened := text.find(opens, start)) >= 0:
        inner = opened + len(opens)
        closed, again = text.find(closes, inner), text.find(opens, inner)
        if closed < 0 or 0 <= again < closed:
            raise _Malformed(opened, f"{opens} without {closes}", name)
        yield inner, text[inner:closed]
        start = closed + len(closes)


def _json(text: str, position: int) -> Any:
    """A JSON value without NaN and without repeated keys. Raises _Malformed."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise _Malformed(position, f"key {twice!r:.80} is given twice")
        return dict(pairs)

    def no_number(constant: str) -> Any:
        raise _Malformed(position, f"{constant} is no JSON")

    try:
        return read_json(text, object_pairs_hook=unique, parse_constant=no_number)
    except json.JSONDecodeError as error:
        near = shorten(text[error.pos : error.pos + 20], 40)
        raise _Malformed(position + error.pos, f"no JSON ({error.msg.lower()}), near {near!r}") from None
    except ValueError as error:  # nested without end; a number of thousands of digits
        raise _Malformed(position, f"no JSON ({error!s:.80})") from None


def _part(schemas: Schemas, tool: str, parameter: str) -> Mapping[str, Any]:
    return schemas.get(tool, {}).get("properties", {}).get(parameter, {})


def _is_word(part: Mapping[str, Any]) -> bool:
    options = part.get("anyOf", [part])
    return all(option.get("type") in ("string", "integer", "number", "boolean", "null") for option in options)


def _typed(text: str, part: Mapping[str, Any]) -> Any:
    """A word as the schema types it; one that is not of the type stays text, and validation says so."""
    options = [option.get("type") for option in part.get("anyOf", [part])]
    if "null" in options and text == "null":
        return None
    if "string" in options or options == [None]:
        return text
    try:
        return _json(text, 0)
    except _Malformed:
        return text
