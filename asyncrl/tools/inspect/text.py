"""Text that a model or a data set wrote, made safe to look at."""

from __future__ import annotations

import unicodedata


def visible(text: str, *, lines: bool = False) -> str:
    """Control, formatting and private characters are shown, not sent: text may hold escape sequences to a terminal.

    With `lines`, a line break is shown and made as well.
    """
    return "".join(character if _harmless(character) else _escaped(character, lines) for character in text)


def _harmless(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # spaces of every script


def _escaped(character: str, lines: bool) -> str:
    if character == "\n":
        return "↵\n" if lines else "↵"
    if character == "\t":
        return "→"
    return character.encode("unicode_escape").decode()


def one_line(text: str, limit: int) -> str:
    """White space as single spaces, at most `limit` characters."""
    line = visible(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
