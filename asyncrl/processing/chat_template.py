"""The chat template of a model folder: messages as text, on one day, with the settings of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from functools import partial
from typing import Any

from jinja2 import meta, nodes

from asyncrl.errors import UserError, did_you_mean

Rendered = list[dict[str, Any]]
"""Messages as chat templates take them, with lists of parts, `{"type": "text", ...}` and such."""
_CLOCK = "strftime_now"
"""Name of the clock that a template may ask: a function that formats the time."""
_SET_HERE = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", _CLOCK}
"""Names that a run gives a template itself, beside the tokenizer's special tokens."""
ASKED, SAID, SHOWN = "asyncrl-asks", "asyncrl-says", "asyncrl-shows"
"""Texts of conversations that show what a template does; none is part of another."""


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def settings_of(source: str) -> set[str]:
    """Names whose values a template takes from outside: not those that it sets first."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # pyright: ignore[reportPrivateUsage]

    tree = _compile_jinja_template(source).environment.parse(source)
    first: dict[str, str] = {}
    for node in tree.find_all((nodes.Assign, nodes.Name)):
        names = node.node.find_all(nodes.Name) if isinstance(node, nodes.Assign) else [node]
        for name in names:  # a value is read before it is set
            first.setdefault(name.name, name.ctx)
    return {name for name in meta.find_undeclared_variables(tree) if first.get(name) == "load"}


class ChatTemplate:
    """The template of a transformers processor, or of a tokenizer for models that read text only."""

    def __init__(self, processor: Any, day: str = "", settings: Mapping[str, Any] | None = None):
        """`day`: YYYY-MM-DD, today for a template that asks, at 0:00; empty: the day of this call. `settings`: values
        of names that the template reads, as `data.chat_template_kwargs` has them. Raises UserError for other names."""
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._reads_parts = getattr(processor, "image_processor", None) is not None
        self.source: str | dict[str, str] = getattr(processor, "chat_template", None) or self._tokenizer.chat_template
        self.writes_date = _CLOCK in str(self.source)
        """Whether prompts depend on the day."""
        self.day = day or date.today().isoformat()
        """A run sets its own before it makes prompts (`learner/loop/resume.py`), a server its learner's."""
        self.settings = dict(settings or {})
        if self.settings:
            self._check_settings()

    def _check_settings(self) -> None:
        taken = _SET_HERE | {*self._tokenizer.special_tokens_map}
        sources = self.source.values() if isinstance(self.source, dict) else (self.source,)
        read = set[str]().union(*map(settings_of, sources)) - taken
        for name in self.settings:
            if name in taken:
                raise UserError(
                    f"data.chat_template_kwargs sets {name}, which is not the configuration's to set: messages come of "
                    "the rows, tools of the environment, the day of model.template_date, special tokens of the "
                    "tokenizer. Take it out"
                )
            if name not in read:
                there = f"It reads {', '.join(sorted(read))}" if read else "It reads no settings: leave the key out"
                raise UserError(
                    f"data.chat_template_kwargs sets {name}, which the model's chat template does not read, so that "
                    f"nothing would change.{did_you_mean(name, read)} {there}"
                )

    def render(self, messages: Rendered, *, tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Text of the messages, with the tools in the template's own list."""
        options |= self.settings
        if tools:
            options["tools"] = tools
        apply = self._processor.apply_chat_template
        if self.writes_date:
            options[_CLOCK] = partial(datetime.strftime, datetime.fromisoformat(self.day))
            if self._reads_parts:  # it warns of a clock in each call; its tokenizer renders the same
                apply = self._tokenizer.apply_chat_template
                options["chat_template"] = self.source if isinstance(self.source, str) else self.source["default"]
        if not self._reads_parts:  # text-only templates expect plain strings
            messages = [
                m if m["content"] is None else {**m, "content": "".join(part["text"] for part in m["content"])}
                for m in messages
            ]
        return apply(messages, tokenize=False, **options)

    def described_system_prompt(self, prompt: str) -> str:
        """A line about the words that the template puts before a conversation of its own accord, such as a default
        system prompt; empty where this rendered prompt has none of them.

        They are what stands before the first question and not before a later one, beside special tokens.
        """
        talk = [said("system", SHOWN), said("user", ASKED), said("assistant", SAID), said("user", SHOWN)]
        try:
            before, _, behind = self.render(talk[1:]).partition(ASKED)
            under = self.render(talk[:2]).partition(ASKED)[0]
        except Exception:  # templates raise what they like: some take no system message
            return ""
        later = behind.partition(SAID)[2].partition(SHOWN)[0]
        tokens = sorted((token.content for token in self._tokenizer.added_tokens_decoder.values()), key=len)
        parting = re.compile("|".join(map(re.escape, reversed(tokens))) or "(?!)")
        own, every = ({part.strip() for part in parting.split(text)} for text in (before, later))
        words = max(own - every, key=len, default="")
        if not words or words not in prompt:
            return ""
        instead = "" if words in under else ". A system message (data.system_prompt) takes its place"
        return f"the chat template begins with words of its own: {words.removeprefix('system').strip()!r}{instead}"
