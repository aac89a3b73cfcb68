"""What a run ran on, and what changed between its starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.tools.report.markup import moment, text
from asyncrl.tools.report.run import Record, Run, number


def environment(run: Run) -> str:
    """HTML; a sentence where it was not recorded."""
    if not run.starts:
        return '<p class="empty">It is not known what this run ran on.</p>'
    latest = run.starts[-1]
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in _facts(latest))
    servers = {str(s["who"]): str(s.get("engine", "unknown")) for s in run.spans if s["what"] == "usage"}
    rows += "".join(
        f"<dt>rollout server</dt><dd>{text(name)} ({text(engine)} engine)</dd>" for name, engine in servers.items()
    )
    return f'<dl class="facts">{rows}</dl>{_starts(run) if len(run.starts) > 1 else ""}'


def describe(run: Run) -> dict[str, str]:
    """Of the newest start, for a comparison."""
    return dict(_facts(run.starts[-1])) if run.starts else {}


def _facts(start: Record) -> Iterator[tuple[str, str]]:
    for name in ("device", "gpus", "cpu", "cores", "memory_gib", "os", "python"):
        value = start.get(name)
        if value not in (None, "", []):
            yield name.replace("memory_gib", "memory, GiB"), _joined(value)
    for section, prefix in (("packages", ""), ("git", "commit of ")):
        found = start.get(section)
        for name, value in found.items() if isinstance(found, dict) else ():
            yield f"{prefix}{name}", str(value)


def _joined(value: Any) -> str:
    """`2 x NVIDIA H100` for what is there twice."""
    if not isinstance(value, list):
        return str(value)
    names = [str(name) for name in value]
    return ", ".join(f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))


def _starts(run: Run) -> str:
    rows, before = [], {}
    for start in run.starts:
        facts = dict(_facts(start))
        changed = [f"{name} {value}" for name, value in facts.items() if before and before.get(name) != value]
        at = moment(number(start.get("time")))
        rows.append(
            f"<tr><td>{at}</td><td>{text(start.get('step', '-'))}</td><td>{text(', '.join(changed) or '-')}</td></tr>"
        )
        before = facts
    head = "<tr><th>started</th><th>after step</th><th>changed since the last start</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
