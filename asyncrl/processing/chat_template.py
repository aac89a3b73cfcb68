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
        """`day`: YYYY-MM-DD, today for a template that asks, at 0:00; empty: the day of this call."""
        self._processor = processor
        self._reads_parts = getattr(processor, "image_processor", None) is not None
        self.source: str | dict[str, str] = (
            getattr(processor, "chat_template", None) or getattr(processor, "tokenizer", processor).chat_template
        )
        self.writes_date = _CLOCK in str(self.source)
        """Whether prompts depend on the day."""
        self.day = day or date.today().isoformat()
        """A run sets its own before it makes prompts (`learner/loop/resume.py`), a server its learner's."""

    def render(self, messages: Rendered, *, tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Text of the messages, with the tools in the template's own list."""
        if tools:
            options["tools"] = tools
        apply = self._processor.apply_chat_template
        if self.writes_date:
            options[_CLOCK] = partial(datetime.strftime, datetime.fromisoformat(self.day))
            if self._reads_parts:  # it warns of a clock in each call; its tokenizer renders the same
                apply = self._processor.tokenizer.apply_chat_template
                options["chat_template"] = self.source if isinstance(self.source, str) else self.source["default"]
        if not self._reads_parts:  # text-only templates expect plain strings
            messages = [
                m if m["content"] is None else {**m, "content": "".join(part["text"] for part in m["content"])}
                for m in messages
            ]
        return apply(messages, tokenize=False, **options)
