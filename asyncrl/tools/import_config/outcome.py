"""What becomes of one of their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["taken over", "translated", "no counterpart", "unknown"]


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our keys, dotted, and their values."""
    text: str = ""
    """How it was translated, or why there is no counterpart."""
    missing: str = ""
    """What the user still has to give."""


Values = Mapping[str, Any]
"""All of their settings: those given, and their defaults where none is."""
Rule = Callable[[Any, Values], Outcome]
"""Of a value that is not null."""


def same(ours: str) -> Rule:
    """One key for another, same meaning, same unit."""
    return lambda value, _: Outcome("taken over", {ours: value})


def absent(why: str) -> Rule:
    return lambda value, _: Outcome("no counterpart", text=why)


def nothing_to_set(text: str) -> Outcome:
    return Outcome("translated", text=text)


def part_of(whole: str) -> Rule:
    """A key that is read together with another one."""
    return lambda value, _: nothing_to_set(f"read with {whole}")


def only(harmless: Any, why: str, *, text: str = "that is how it is here") -> Rule:
    """A key of which one value asks for what is done here anyway; any other has no counterpart."""
    return lambda value, _: nothing_to_set(text) if value == harmless else Outcome("no counterpart", text=why)


def negative_is_zero(ours: str, meaning: str) -> Rule:
    """Off is -1 there and 0 here."""

    def rule(value: Any, _: Values) -> Outcome:
        if isinstance(value, int) and value < 0:
            return Outcome("translated", {ours: 0}, f"off is -1 there and 0 here ({meaning})")
        return Outcome("taken over", {ours: value})

    return rule
