"""Tools in the prompt: listed by the chat template itself where it can, else in the system message; and calls of them
in turns of the assistant that a row has.

Rollout server and learner each ask the environment for the list (`PromptTools` of asyncrl/environments/interface.py),
and it is part of the processor's fingerprint: a server whose tools differ is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import product
from typing import Any, Protocol

from asyncrl.environments.interface import PromptTools
from asyncrl.errors import UserError
from asyncrl.processing.chat_template import Rendered, said

_MADE_UP = {
    "type": "function",
    "function": {
        "name": "asyncrl_tool",
        "description": "asyncrl-describes",
        "parameters": {"type": "object", "properties": {"asyncrl_part": {"type": "string", "description": "asyncrl"}}},
    },
}


class Template(Protocol):
    """Rendering of messages by a model's chat template."""

    def __call__(self, messages: Rendered, *, tools: list[dict[str, Any]] | None = None) -> str: ...


class ToolPrompt:
    """How the prompts of one model tell of the tools."""

    def __init__(self, shown: PromptTools, template: Template, placeholders: tuple[str, ...] = ()):
        """Raises UserError where the chat template can show the tools in no way that was asked for."""
        missing = _missing(template, shown.markers)
        if shown.show == "template" and missing:
            raise UserError(
                f"environment.config.show_tools is template, but the model's chat template {missing}. Use text or auto"
            )
        self.schemas = list(shown.schemas) if shown.show != "text" and not missing else None
        """Schemas for the template's own list; None: `text` stands in the system message."""
        self.text = "" if self.schemas else shown.text
        self.digest = hashlib.sha256(shown.as_json.encode()).hexdigest()[:16]
        told = self.text or shown.as_json
        if reserved := next((each for each in placeholders if each in told), None):
            raise UserError(
                f"a tool's description contains {reserved!r}, which the model reserves for images. Fix its docstring"
            )
        if self.text and self.text not in template(self.added([said("user", "asyncrl-asks")])):
            raise UserError(
                "the model's chat template lists no tools and shows no system message: the prompt cannot tell of the "
                "tools. Set environment.config.show_tools=off, and say in data.format_prompt how a call is written"
            )

    def added(self, messages: Rendered) -> Rendered:
        """Messages with the text at the end of the system message."""
        if not self.text:
            return messages
        first, *rest = messages
        if first["role"] != "system":
            return [said("system", self.text), *messages]
        return [{**first, "content": [*first["content"], {"type": "text", "text": f"\n\n{self.text}"}]}, *rest]


class CallForm:
    """The form in which a model's chat template shows the calls in a turn of the assistant."""

    def __init__(self, template: Template):
        self._template = template
        self._found: dict[bool, tuple[bool, bool] | None] = {}
        """Whether arguments are JSON text, and whether a turn without text has null for it; by whether the turn has
        text. None: the template does not show both."""

    def written(self, message: dict[str, Any], row_id: str) -> dict[str, Any]:
        """The message as the template shows it. Raises UserError where it would leave the calls out."""
        if not message.get("tool_calls"):
            return message
        has_text = bool(message["content"])
        if has_text not in self._found:
            self._found[has_text] = self._probed(has_text)
        form = self._found[has_text]
        if form is None:
            raise UserError(
                f"row {row_id}: the assistant's message has tool_calls{' and text' * has_text}, and the model's chat "
                f"template does not show {'both' if has_text else 'them'}. Use a model whose template does, or leave "
                "the row out"
            )
        return _in_form(message, *form)

    def _probed(self, has_text: bool) -> tuple[bool, bool] | None:
        function = {"name": "asyncrl_tool", "arguments": {"asyncrl_part": "asyncrl-shown"}}
        parts = said("assistant", "asyncrl-says")["content"] if has_text else []
        call = {"id": "asyncrl00", "type": "function", "function": function}  # Mistral's ids have 9 characters
        turn = {"role": "assistant", "content": parts, "tool_calls": [call]}
        result = {**said("tool", "asyncrl-answers"), "name": "asyncrl_tool", "tool_call_id": "asyncrl00"}
        words = ("asyncrl_tool", "asyncrl_part", "asyncrl-shown", *(["asyncrl-says"] if has_text else []))
        for form in product((False, True), (False,) if has_text else (False, True)):
            try:
                text = self._template([said("user", "asyncrl-asks"), _in_form(turn, *form), result])
            except Exception:  # templates raise what they like: another form may do
                continue
            if all(word in text for word in words) and '\\"asyncrl_part' not in text:  # no text within text
                return form
        return None


def _in_form(message: dict[str, Any], is_text: bool, is_null: bool) -> dict[str, Any]:
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls if is_text else ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        call["function"] = {**call["function"], "arguments": arguments}
    return {**message, "tool_calls": calls} | ({"content": None} if is_null else {})


def _missing(template: Callable[..., str], forms: tuple[tuple[str, ...], ...]) -> str:
    """Reason why a template cannot list tools and ask for their calls; empty where it can."""
    messages = [said("user", "asyncrl-asks")]
    try:
        text, without = template(messages, tools=[_MADE_UP]), template(messages)
    except Exception as error:  # templates raise what they like
        return f"fails on tools ({type(error).__name__}: {error})"
    if not all(word in text for word in ("asyncrl_tool", "asyncrl-describes", "asyncrl_part")):
        return "does not list tools"
    if not any(all(marker in text and marker not in without for marker in form) for form in forms):
        asked = " or ".join(map(" ".join, forms)) or "which no template does"
        return f"does not ask for calls as the environment reads them ({asked})"
    return ""
