"""Findings for people, one aligned line each, and for scripts, as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import asdict

from asyncrl.tools.doctor.findings import Finding, Verdict

MARKS: dict[Verdict, str] = {"ok": "ok", "note": "-", "warning": "WARNING", "problem": "PROBLEM"}
_LEFT = 28
"""Columns of mark and name."""
_SLOW_S = 1.0
"""From here on a line says how long it took."""


class Report:
    """Collects what is found; prints it at once unless it is to be one JSON document."""

    def __init__(self, *, as_json: bool):
        self.found: list[tuple[Finding, float]] = []
        self._as_json = as_json
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0

    def tell(self, finding: Finding, seconds: float) -> None:
        self.found.append((finding, seconds))
        if not self._as_json:
            print(_text(finding, seconds, self._width), flush=True)

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(finding.verdict for finding, _ in self.found)

    def close(self, seconds: float) -> int:
        """The exit code: 1 if there is a problem."""
        problems, warnings = self.counts["problem"], self.counts["warning"]
        if self._as_json:
            findings = [{**asdict(finding), "seconds": round(spent, 3)} for finding, spent in self.found]
            totals = {"problems": problems, "warnings": warnings, "seconds": round(seconds, 3)}
            print(json.dumps({**totals, "findings": findings}, ensure_ascii=False, indent=2))
        else:
            counted = ", ".join(
                f"{count} {word}{'' if count == 1 else 's'}"
                for count, word in ((problems, "problem"), (warnings, "warning"))
                if count
            )
            print(f"\n{counted or 'nothing is wrong'}, {len(self.found)} findings in {seconds:.1f} s")
        return 1 if problems else 0


def _text(finding: Finding, seconds: float, width: int) -> str:
    """One line, or on a terminal of so many columns as many as it takes."""
    slow = f" ({seconds:.1f} s)" if seconds >= _SLOW_S else ""
    fix = f". Fix: {finding.fix}" if finding.fix else ""
    left = f"{MARKS[finding.verdict]:<8}{finding.what:<{_LEFT - 9}} "
    line = left + " ".join(f"{finding.value}{slow}{fix}".split())
    if width > 2 * _LEFT:
        line = textwrap.fill(line, width, subsequent_indent=" " * _LEFT, break_long_words=False, break_on_hyphens=False)
        line = left + line[_LEFT:]
    return "\n".join([line, *(f"{'':<{_LEFT}}{detail}".rstrip() for detail in finding.details)])
