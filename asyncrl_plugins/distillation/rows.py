"""Columns of a row that choose its teacher, or that the teacher alone sees. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from string import Formatter
from typing import Any

from protocol.messages import Prompt, TextPart

DEFAULT = "default"
"""Teacher of rows that no other is named for."""


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Columns of a ticket's row, and `answer`, which is that of data.answer_key where no column has this name."""
    return {"answer": prompt.answer, **prompt.columns}


def text_of(value: Any) -> str:
    """Text of a column's value. Empty where it has none: nothing, NaN, blanks, lists, maps and bytes."""
    is_nan = isinstance(value, float) and isnan(value)
    return "" if value is None or is_nan or isinstance(value, list | dict | bytes) else str(value).strip()


def teacher_of(columns: Mapping[str, Any], key: str, teachers: Mapping[str, str]) -> str | None:
    """Name of a row's teacher; None where it has none."""
    value = text_of(columns.get(key))
    return value if value in teachers else DEFAULT if DEFAULT in teachers else None


class Hint:
    """Text with columns of a row in braces."""

    def __init__(self, template: str):
        """Raises ValueError where the braces name no columns."""
        try:
            self._parts = list(Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"{template!r}: {error}. Write columns as {{answer}}, and a brace itself twice") from None
        for _, column, form, conversion in self._parts:
            if column == "" or form or conversion:
                raise ValueError(f"{template!r} has braces that hold no column's name alone. Write {{answer}}")

    @property
    def columns(self) -> list[str]:
        return [column for _, column, _, _ in self._parts if column]

    def missing(self, columns: Mapping[str, Any]) -> list[str]:
        """Names of its columns that the row has no text in."""
        return [name for name in self.columns if not text_of(columns.get(name))]

    def of(self, columns: Mapping[str, Any]) -> str:
        """The text of a row."""
        return "".join(text + (text_of(columns[name]) if name else "") for text, name, _, _ in self._parts)


def hinted(prompt: Prompt, hint: str) -> Prompt:
    """The prompt with a text behind its last user's message, or its last one where no user speaks. Images stay."""
    users = [number for number, message in enumerate(prompt.messages) if message.role == "user"]
    place = users[-1] if users else len(prompt.messages) - 1
    message = prompt.messages[place]
    *before, last = message.content or (TextPart(text=""),)
    behind = (TextPart(text=f"{last.text}\n\n{hint}"),) if last.type == "text" else (last, TextPart(text=hint))
    said = message.model_copy(update={"content": (*before, *behind)})
    return prompt.model_copy(update={"messages": (*prompt.messages[:place], said, *prompt.messages[place + 1 :])})
