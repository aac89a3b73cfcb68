"""The chat template of a model folder: messages as text, on one day."""

from __future__ import annotations

from datetime import date, datetime
from functools import partial
from typing import Any

Rendered = list[dict[str, Any]]
"""Messages as chat templates take them, with lists of parts, `{"type": "text", ...}` and such."""
_CLOCK = "strftime_now"
"""Name of the clock that a template may ask: a function that formats the time."""


class ChatTemplate:
    """The template of a transformers processor, or of a tokenizer for models that read text only."""

    def __init__(self, processor: Any, day: str = ""):
        """`day`: YYYY-MM-DD, today for a template that asks; empty: the day of this call. It is 0:00 all day."""
        self._processor = processor
        self._reads_parts = getattr(processor, "image_processor", None) is not None
        self.source: str | dict[str, str] = (
            getattr(processor, "chat_template", None) or getattr(processor, "tokenizer", processor).chat_template
        )
        self.writes_date = _CLOCK in str(self.source)
        """Whether prompts depend on the day."""
        self.day = day or date.today().isoformat()

    def render(self, messages: Rendered, *, tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Text of the messages, with the tools in the template's own list."""
        if tools:
            options["tools"] = tools
        if self.writes_date:  # transformers warns of a variable that a template does not read
            options[_CLOCK] = partial(datetime.strftime, datetime.fromisoformat(self.day))
        if not self._reads_parts:  # text-only templates expect plain strings
            messages = [
                m if m["content"] is None else {**m, "content": "".join(part["text"] for part in m["content"])}
                for m in messages
            ]
        return self._processor.apply_chat_template(messages, tokenize=False, **options)
