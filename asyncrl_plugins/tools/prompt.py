"""Settings of calls, and the tools as prompts tell of them: schemas, and a text that says how a call is written.

A chat template that lists tools itself, and asks for calls as the call format reads them, is given the schemas
(`tools=` of transformers); for any other the text ends the system message (`asyncrl/processing/tool_prompt.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, Field

from asyncrl.environments.interface import PromptTools
from asyncrl_plugins.tools.call_formats import CallReader, example_call
from asyncrl_plugins.tools.schema import Tool

ShowTools = Literal["auto", "template", "text", "off"]
_HERMES, _QWEN_XML = ("<tool_call>", '"name"', '"arguments"'), ("<tool_call>", "<function=", "<parameter=")
MARKERS = {"hermes": (_HERMES,), "qwen_xml": (_QWEN_XML,), "tool_call": (_HERMES, _QWEN_XML)}
"""Strings that a template which asks for calls of this format, in each of its forms, writes beside the list of
tools."""


class CallSettings(BaseModel):
    """Keys of `environment.config` of each environment whose policy calls tools."""

    call_format: str = "auto"
    """Form of calls: tool_call, hermes, qwen_xml, tag:<name>, python, plain, none. `auto`: the class's own."""
    show_tools: ShowTools = "auto"
    """Form of the list of tools in prompts. `template`: as the chat template lists them, which must ask for calls as
    call_format reads them; `text`: in the system message; `auto`: the former where it can be, unless the class tells of
    them itself; `off`."""


class ToolSettings(CallSettings):
    """Keys of `environment.config` of every ToolEnvironment."""

    calls_per_turn: int = Field(default=4, gt=0)
    """Most calls in one turn; each one over it is not run, and its result says so."""


def show_wish(config: Any, class_shows: bool = True) -> ShowTools:
    """Form of the list of tools by `environment.config.show_tools`, and by the class where it is auto."""
    wish: ShowTools = getattr(config, "show_tools", "auto")
    return "off" if wish == "auto" and not class_shows else wish


def prompt_tools(tools: Iterable[Tool], reader: CallReader, show: ShowTools) -> PromptTools | None:
    """The tools as prompts tell of them; None where the policy has none to call."""
    schemas = tuple(tool.schema for tool in tools)
    if not schemas or reader.call_format == "none":
        return None
    markers = MARKERS.get(reader.call_format, ())
    example = example_call(reader.call_format, reader.schemas)
    return PromptTools(schemas, _text(schemas, reader.call_format), markers, show, example)


def _text(schemas: tuple[dict[str, Any], ...], call_format: str) -> str:
    """Names, parameters and the form of a call, for a system message."""
    kind, _, tag = call_format.partition(":")
    lines = "\n".join(_line(schema["function"], kind) for schema in schemas)
    form = "\n".join(_FORMS[kind]).replace("TAG", tag)
    return f"You can call these tools:\n{lines}\n\n{form}"


def _line(tool: dict[str, Any], kind: str) -> str:
    if kind in MARKERS:
        return json.dumps(tool, ensure_ascii=False)
    parameters = tool["parameters"].get("properties", {})
    usage = " ".join([tool["name"], *(name.upper() for name in parameters)]) if kind == "plain" else tool["name"]
    told = "; ".join(_parameter(name, part) for name, part in parameters.items())
    return f"{usage}: {tool['description']}{f' ({told})' if told else ''}"


def _parameter(name: str, part: dict[str, Any]) -> str:
    choices = "".join(f", {json.dumps(value)}" for value in part.get("enum", ())).removeprefix(", ")
    extra = [f"one of {choices}"] if choices else []
    extra += [f"default {json.dumps(part['default'])}"] if "default" in part else []
    return "".join([f"{name}: {part.get('description', '')}", *(f", {each}" for each in extra)])


_JSON_FORM = [
    "A call is its name and arguments as JSON between tags, several calls one behind the other:",
    "<tool_call>",
    '{"name": NAME, "arguments": {PARAMETER: VALUE}}',
    "</tool_call>",
]
_FORMS: dict[str, list[str]] = {
    "tool_call": _JSON_FORM,
    "hermes": _JSON_FORM,
    "qwen_xml": [
        "A call is written so, several calls one behind the other:",
        "<tool_call>",
        "<function=NAME>",
        "<parameter=PARAMETER>",
        "VALUE",
        "</parameter>",
        "</function>",
        "</tool_call>",
    ],
    "tag": ["A call of TAG is its argument between tags: <TAG>...</TAG>"],
    "python": ["A call is a block of code:", "```python", "...", "```"],
    "plain": ["A call is one line and nothing else: the name of a tool and its arguments in order."],
}
