"""The page of one run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from asyncrl.tools.report.charts import groups
from asyncrl.tools.report.configuration import configuration
from asyncrl.tools.report.environment import environment
from asyncrl.tools.report.findings import Finding, findings, quiet, verdict
from asyncrl.tools.report.markup import count, duration, figure, moment, text
from asyncrl.tools.report.run import Run, number
from asyncrl.tools.report.samples import samples
from asyncrl.tools.report.timeline import timeline

Section = tuple[str, str]
"""Title and HTML."""


def page_of(run: Run) -> str:
    """A whole HTML document."""
    found = findings(run)
    sections: list[Section] = [("Health", _health(run, found))]
    sections += [(title, f'<div class="charts">{"".join(charts)}</div>') for title, charts in groups(run)]
    sections += [
        ("Timeline", timeline(run)),
        ("Samples", samples(run)),
        ("Configuration", configuration(run)),
        ("Environment", environment(run)),
    ]
    return document(run.name, _head(run, found), sections)


def document(title: str, head: str, sections: Sequence[Section]) -> str:
    """Nothing is loaded from anywhere; the only script that may run is ours."""
    style, script = _asset("report.css"), _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = "".join(f'<a href="#{_anchor(name)}">{text(name)}</a>' for name, _ in sections)
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{text(name)}</h2>{content}</section>' for name, content in sections
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)} - asyncrl report</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><style>{style}</style></head><body><main>{head}<nav>{links}</nav>{body}</main>'
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


@cache
def _asset(name: str) -> str:
    return files("asyncrl.tools.report").joinpath(name).read_text()


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _head(run: Run, found: list[Finding]) -> str:
    tone, sentence = verdict(run, found)
    facts = "".join(
        f'<div class="fact"><span>{text(name)}</span><b>{text(value)}</b><small>{text(note)}</small></div>'
        for name, value, note in _facts(run)
    )
    ending = run.ending or "unknown"
    return (
        f'<header class="top"><h1>{text(run.name)}<span class="ending e-{text(ending)}">{text(ending)}</span></h1>'
        f'<p class="what">{text(_what(run))}</p><div class="facts-row">{facts}</div>'
        f'<p class="verdict v-{tone}">{text(sentence)}</p></header>'
    )


def _what(run: Run) -> str:
    """One line: the model, the algorithm, the mode, and when."""
    parts = [
        str(run.setting("model.path") or "model unknown"),
        str(run.setting("algorithm.adv_estimator") or "algorithm unknown"),
        f"{run.setting('trainer.mode')} mode" if run.setting("trainer.mode") else "",
        f"{run.setting('rollout.engine')} engine" if run.setting("rollout.engine") else "",
        f"began {moment(run.clock[0])}" if run.clock else "",
    ]
    return "  ·  ".join(part for part in parts if part)


def _facts(run: Run) -> list[tuple[str, str, str]]:
    """Name, value, and what is to be known of it."""
    total, step = number(run.status.get("total_steps")), _step(run)
    tokens = sum(run.values("tokens"))
    restarts = len(run.starts) - 1
    return [
        ("held-out accuracy", *held_out(run)),
        ("reward", course(run, "reward/mean"), "means of the first and last tenth"),
        ("steps", f"{step:,.0f}" + (f" of {total:,.0f}" if total and total != step else ""), "made and recorded"),
        ("duration", duration(run.busy_s), count(restarts, "restart") if restarts > 0 else "of the learner"),
        ("trajectories", figure(float(run.trajectories)), f"{figure(tokens)} tokens trained on"),
        ("time of a step", _pace(run), "median"),
    ]


def held_out(run: Run) -> tuple[str, str]:
    """First and last accuracy, and over what."""
    scored = [(step, value) for step, value in run.held_out if value is not None]
    if not scored:
        return "-", "never evaluated"
    (first, before), (last, after) = scored[0], scored[-1]
    rows = number(run.evaluations[-1].get("rows"))
    over = f", {rows:,.0f} rows" if rows else ""
    if len(scored) == 1:
        return f"{after:.3f}", f"step {last:.0f}{over}"
    return f"{before:.3f} → {after:.3f}", f"steps {first:.0f} and {last:.0f}{over}"


def course(run: Run, key: str) -> str:
    """Mean of the first tenth and of the last."""
    values = run.values(key)
    tenth = max(1, len(values) // 10)
    if not values:
        return "-"
    if len(values) < 3:
        return f"{values[-1]:.3f}"
    return f"{sum(values[:tenth]) / tenth:.3f} → {sum(values[-tenth:]) / tenth:.3f}"


def _step(run: Run) -> float:
    return number(run.steps[-1]["step"]) or 0.0 if run.steps else number(run.status.get("step")) or 0.0


def _pace(run: Run) -> str:
    seconds = sorted(run.values("step_s"))
    return duration(seconds[len(seconds) // 2]) if seconds else "-"


def _health(run: Run, found: list[Finding]) -> str:
    rows = "".join(
        f'<tr class="f-{finding.level}"><td><span class="level">{finding.level}</span></td>'
        f"<td>{text(finding.what)}</td><td>{text(finding.value)}</td><td>{text(finding.advice)}</td></tr>"
        for finding in found
    )
    table = f'<table class="findings"><tbody>{rows}</tbody></table>' if rows else ""
    said = f'<p class="note">Nothing was found about {text(", ".join(quiet(run)))}.</p>' if run.steps else ""
    missing = "".join(f"<li>{text(sentence)}</li>" for sentence in run.missing)
    return table + said + (f'<ul class="missing">{missing}</ul>' if missing else "")
