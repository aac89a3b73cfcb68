"""Tools as the policy is told of them: their schemas, and the text that says how a call is written.

A chat template that lists tools itself, and asks for calls as `environment.call_format` reads them, is given the
schemas (`tools=` of transformers); for any other the text below ends the system message
(`asyncrl/processing/tool_prompt.py`).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.environment import EnvironmentConfig, ShowTools
from asyncrl.environments.episodes import EnvironmentWorkers


@dataclass(frozen=True)
class ShownTools:
    """Tools as the policy sees them; equal on rollout server and learner."""

    schemas: tuple[dict[str, Any], ...]
    """Schemas in the form that chat templates take."""
    call_format: str
    show: ShowTools = "auto"

    @property
    def as_json(self) -> str:
        """Equal for equal prompts, so with keys in their order: a prompt writes them in it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ShownTools:
        values = json.loads(text)
        return cls(tuple(values["schemas"]), values["call_format"], values["show"])

    def text(self) -> str:
        """Names, parameters and the form of a call, for a system message."""
        kind, _, tag = self.call_format.partition(":")
        lines = "\n".join(_line(schema["function"], kind) for schema in self.schemas)
        return f"You can call these tools:\n{lines}\n\n{_form(kind, tag)}"


def shown_tools(config: EnvironmentConfig) -> ShownTools | None:
    """The tools of the configured environment, asked of a process that has loaded it; None where none are to be shown.

    For code without an event loop. Raises UserError where the environment cannot be loaded.
    """
    if not config.is_used or config.show_tools == "off":
        return None

    async def ask() -> ShownTools | None:
        pool = EnvironmentWorkers(config.model_copy(update={"workers": 1, "instances_per_worker": 1}))
        try:
            await pool.start()
            return tools_of(pool, config)
        finally:
            await pool.close()

    return asyncio.run(ask())


def tools_of(pool: EnvironmentWorkers, config: EnvironmentConfig) -> ShownTools | None:
    """The tools of a pool that has started; None where there are none, or they are not to be shown."""
    is_wanted = config.show_tools != "off" and (pool.shows_tools or config.show_tools != "auto")
    if not pool.tools or pool.call_format == "none" or not is_wanted:
        return None
    return ShownTools(tuple(pool.tools), pool.call_format, config.show_tools)


def _line(tool: dict[str, Any], kind: str) -> str:
    if kind in ("hermes", "qwen_xml"):
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


def _form(kind: str, tag: str) -> str:
    return "\n".join(_FORMS[kind]).replace("TAG", tag)


_FORMS: dict[str, list[str]] = {
    "hermes": [
        "A call is its name and arguments as JSON between tags, several calls one behind the other:",
        "<tool_call>",
        '{"name": NAME, "arguments": {PARAMETER: VALUE}}',
        "</tool_call>",
    ],
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
