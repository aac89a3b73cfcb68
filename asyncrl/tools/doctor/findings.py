"""Findings of checks, and the report of them: for people one aligned line each, for scripts JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

Verdict = Literal["ok", "note", "warning", "problem"]
"""`note`: a fact without judgement. `problem`: a run would fail, or be worth nothing."""
MARKS: dict[Verdict, str] = {"ok": "ok", "note": "-", "warning": "WARNING", "problem": "PROBLEM"}
T = TypeVar("T")
_SENTENCE_END = re.compile(r"(?<=[^.])[.?] (?=[A-Z])")
_FULL_STOP = re.compile(r"(?<!\.)\.$")
_LEFT = 28
"""Columns of mark and name."""
_SLOW_S = 1.0
"""A line says how long it took from here on."""


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""
    details: tuple[str, ...] = ()
    """Further lines for people."""


Findings = Generator[Finding, None, T]
"""A check: yields findings, and returns what later checks need. A UserError that it raises is a problem, too."""


def problem(what: str, error: Exception) -> Finding:
    """Our errors say what happened, with its values, in their first sentence, and the fix after it."""
    head, *details = str(error).splitlines() or [type(error).__name__]
    if head.endswith(":") and details:  # a heading of several problems
        head, details = f"{head} {details[0].removeprefix('- ')}", details[1:]
    value, fix = split_fix(head)
    return Finding(what, value, "problem", fix, tuple(details))


def split_fix(text: str) -> tuple[str, str]:
    """Value and fix, split after the first sentence; the fix is empty where there is only one."""
    value, fix = (_FULL_STOP.sub("", part) for part in (*_SENTENCE_END.split(text, maxsplit=1), "")[:2])
    return value, fix


class Report:
    """Collects findings with the seconds that each took; prints them at once, or all as one JSON document."""

    def __init__(self, *, as_json: bool):
        self.findings: list[tuple[Finding, float]] = []
        self._as_json = as_json
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        self._began = self._last = time.monotonic()

    def add(self, finding: Finding) -> None:
        seconds = time.monotonic() - self._last
        self._last += seconds
        self.findings.append((finding, seconds))
        if not self._as_json:
            print(_text(finding, seconds, self._width), flush=True)

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(finding.verdict for finding, _ in self.findings)

    def close(self) -> int:
        """Prints the totals. Returns the exit code: 1 if there is a problem."""
        problems, warnings = self.counts["problem"], self.counts["warning"]
        seconds = time.monotonic() - self._began
        if self._as_json:
            findings = [{**asdict(finding), "seconds": round(spent, 3)} for finding, spent in self.findings]
            totals = {"problems": problems, "warnings": warnings, "seconds": round(seconds, 3)}
            print(json.dumps({**totals, "findings": findings}, ensure_ascii=False, indent=2))
        else:
            counted = ((problems, "problem"), (warnings, "warning"))
            text = ", ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in counted if count)
            print(f"\n{text or 'nothing is wrong'}, {len(self.findings)} findings in {seconds:.1f} s")
        return 1 if problems else 0


def _text(finding: Finding, seconds: float, width: int) -> str:
    """One line, or as many as a terminal of so many columns needs."""
    slow = f" ({seconds:.1f} s)" if seconds >= _SLOW_S else ""
    fix = f". Fix: {finding.fix}" if finding.fix else ""
    left = f"{MARKS[finding.verdict]:<8}{finding.what:<{_LEFT - 9}} "
    line = left + " ".join(f"{finding.value}{slow}{fix}".split())
    if width > 2 * _LEFT:
        line = textwrap.fill(line, width, subsequent_indent=" " * _LEFT, break_long_words=False, break_on_hyphens=False)
        line = left + line[_LEFT:]
    return "\n".join([line, *(f"{'':<{_LEFT}}{detail}".rstrip() for detail in finding.details)])
