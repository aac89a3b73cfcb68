"""Findings of checks, and the report of them: for people one aligned line each, for scripts JSON."""

from __future__ import annotations

import json
import re
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
    """Collects findings; prints each at once, or all as one JSON document."""

    def __init__(self, *, as_json: bool):
        self.findings: list[Finding] = []
        self._as_json = as_json

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        if not self._as_json:
            fix = f". Fix: {finding.fix}" if finding.fix else ""
            left = f"{MARKS[finding.verdict]:<8}{finding.what:<{_LEFT - 9}} "
            print(left + " ".join(f"{finding.value}{fix}".split()), flush=True)
            for detail in finding.details:
                print(f"{'':<{_LEFT}}{detail}".rstrip(), flush=True)

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(finding.verdict for finding in self.findings)

    def close(self) -> int:
        """Prints the totals. Returns the exit code: 1 if there is a problem."""
        problems, warnings = self.counts["problem"], self.counts["warning"]
        if self._as_json:
            findings = [asdict(finding) for finding in self.findings]
            document = {"problems": problems, "warnings": warnings, "findings": findings}
            print(json.dumps(document, ensure_ascii=False, indent=2))
        else:
            counted = ((problems, "problem"), (warnings, "warning"))
            text = ", ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in counted if count)
            print(f"\n{text or 'nothing is wrong'}, {len(self.findings)} findings")
        return 1 if problems else 0
