"""Calls of tools in a row's messages are shown by chat templates of several kinds, or the row is bad."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from asyncrl.errors import UserError
from asyncrl.processing.tool_prompt import CallForm, Template

OPENED = "{% for m in messages %}<|{{ m.role }}|>"
HERMES = (
    OPENED + "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}"
)
"""As Qwen2.5's: arguments are a map."""
TEXT_ALONE = HERMES.replace("c.function.arguments | tojson", "c.function.arguments + ''")
"""Arguments are JSON text."""
NULL = (
    OPENED + "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}{{ c.type }}<sep>"
    "{{ c.function.name }}\n```json\n{{ c.function.arguments + '' }}\n```{% endfor %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
"""As DeepSeek's: calls are shown where the content is null, as text."""
MISTRAL = (
    OPENED + "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ c.function | tojson }}{{ c.id }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PARAMETERS = (
    OPENED + "{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n{{ value }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)
"""As Qwen3-Coder's."""
SILENT = OPENED + "{{ m.content }}{% endfor %}"
"""As of a model without tools: the turn would be empty."""


def template_of(text: str) -> Template:
    """The template of a model that reads text only."""

    def render(messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None) -> str:
        joined = [
            m if m["content"] is None else {**m, "content": "".join(part["text"] for part in m["content"])}
            for m in messages
        ]
        return render_jinja_template([joined], chat_template=text)[0][0]

    return render


def turn(said: str) -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get", "arguments": {"city": "Köln", "n": 2}}}
    parts = [{"type": "text", "text": said}] if said else []
    return {"role": "assistant", "content": parts, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("text", "said"),
    [(HERMES, ""), (HERMES, "I look."), (TEXT_ALONE, ""), (TEXT_ALONE, "I look."), (NULL, ""), (MISTRAL, ""),
     (PARAMETERS, ""), (PARAMETERS, "I look.")],
)  # fmt: skip
def test_calls_are_shown_in_the_form_that_the_template_takes(text: str, said: str) -> None:
    template = template_of(text)
    shown = template([CallForm(template).written(turn(said), "d:0")])
    assert said in shown
    if text == PARAMETERS:
        assert "<function=get><parameter=city>\nKöln<parameter=n>\n2" in shown
        return
    (arguments,) = re.findall(r'\{"city".*?\}', shown)
    assert json.loads(arguments) == {"city": "Köln", "n": 2}, "not as text within text"


@pytest.mark.parametrize(
    ("text", "said", "what"),
    [(SILENT, "", "tool_calls, .* not show them"), (SILENT, "I look.", "tool_calls and text, .* not show both"),
     (NULL, "I look.", ".*not show both"), (MISTRAL, "I look.", ".*not show both")],
)  # fmt: skip
def test_a_template_that_leaves_calls_out_makes_the_row_bad(text: str, said: str, what: str) -> None:
    with pytest.raises(UserError, match=f"row d:0: the assistant's message has {what}"):
        CallForm(template_of(text)).written(turn(said), "d:0")
