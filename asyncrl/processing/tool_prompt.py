"""Tools in the prompt: listed by the chat template itself where it can, else in the system message.

Rollout server and learner each ask the environment for the list (`PromptTools` of asyncrl/environments/interface.py),
and it is part of the processor's fingerprint: a server whose tools differ is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.environments.interface import PromptTools
from asyncrl.errors import UserError

Rendered = list[dict[str, Any]]
"""Messages as chat templates take them, with lists of parts."""

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
        if self.text and self.text not in template(self.added([_message("user", "asyncrl-asks")])):
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
            return [_message("system", self.text), *messages]
        return [{**first, "content": [*first["content"], {"type": "text", "text": f"\n\n{self.text}"}]}, *rest]


def _missing(template: Callable[..., str], markers: tuple[str, ...]) -> str:
    """Reason why a template cannot list tools and ask for their calls; empty where it can."""
    messages = [_message("user", "asyncrl-asks")]
    try:
        text, without = template(messages, tools=[_MADE_UP]), template(messages)
    except Exception as error:  # templates raise what they like
        return f"fails on tools ({type(error).__name__}: {error})"
    if not all(word in text for word in ("asyncrl_tool", "asyncrl-describes", "asyncrl_part")):
        return "does not list tools"
    if not markers or any(marker not in text or marker in without for marker in markers):
        return f"does not ask for calls as the environment reads them ({' '.join(markers) or 'which no template does'})"
    return ""


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}
