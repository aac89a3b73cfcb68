"""What a check has to say: what was looked at, its value, how that is judged, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

Verdict = Literal["ok", "note", "warning", "problem"]
"""`note`: a fact that nobody judges. `problem`: a run would fail, or be worth nothing."""
T = TypeVar("T")
_SENTENCE_END = re.compile(r"(?<=[^.])[.?] (?=[A-Z])")
_FULL_STOP = re.compile(r"(?<!\.)\.$")


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""
    details: tuple[str, ...] = ()
    """Further lines for people."""


Findings = Generator[Finding, None, T]
"""A check: yields what it finds, and returns what later checks need. A UserError that it raises is a problem, too."""


def problem(what: str, error: Exception) -> Finding:
    """Our errors say what happened, with its values, in their first sentence, and the fix after it."""
    head, *details = str(error).splitlines() or [type(error).__name__]
    if head.endswith(":") and details:  # a heading of several problems
        head, details = f"{head} {details[0].removeprefix('- ')}", details[1:]
    value, fix = split_fix(head)
    return Finding(what, value, "problem", fix, tuple(details))


def split_fix(text: str) -> tuple[str, str]:
    """At the end of the first sentence; the fix is empty where there is only one."""
    parts = _SENTENCE_END.split(text, maxsplit=1)
    value, fix = (_FULL_STOP.sub("", part) for part in (parts if len(parts) > 1 else (*parts, "")))
    return value, fix


def size(nbytes: float) -> str:
    """`12.3 GiB`, `4.5 MiB`"""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
