"""The page of one run: its head, its health, and all sections."""

from __future__ import annotations

from statistics import fmean, median

from asyncrl.tools.report.charts import chart_groups
from asyncrl.tools.report.findings import Finding, checks_without_finding, findings, verdict
from asyncrl.tools.report.markup import Section, count, document, duration, figure, moment, text
from asyncrl.tools.report.recorded_run import RecordedRun, number
from asyncrl.tools.report.sample_cards import sample_cards
from asyncrl.tools.report.settings import configuration, environment
from asyncrl.tools.report.timeline import timeline


def page_of(run: RecordedRun) -> str:
    """Build the page of one run."""
    found = findings(run)
    sections: list[Section] = [("Health", _health(run, found))]
    sections += [(title, f'<div class="charts">{"".join(charts)}</div>') for title, charts in chart_groups(run)]
    sections += [
        ("Timeline", timeline(run)),
        ("Samples", sample_cards(run)),
        ("Configuration", configuration(run)),
        ("Environment", environment(run)),
    ]
    return document(run.name, _head(run, found), sections)


def _head(run: RecordedRun, found: list[Finding]) -> str:
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


def _what(run: RecordedRun) -> str:
    """Describe the run in one line: the model, the algorithm, the mode, and when."""
    parts = [
        str(run.setting("model.path") or "model unknown"),
        str(run.setting("algorithm.adv_estimator") or "algorithm unknown"),
        f"{run.setting('trainer.mode')} mode" if run.setting("trainer.mode") else "",
        f"{run.setting('rollout.engine')} engine" if run.setting("rollout.engine") else "",
        f"began {moment(run.clock[0])}" if run.clock else "",
    ]
    return "  ·  ".join(part for part in parts if part)


def _facts(run: RecordedRun) -> list[tuple[str, str, str]]:
    """List the main figures: name, value, and a note."""
    total, step = number(run.status.get("total_steps")), _step(run)
    tokens = sum(run.values("tokens"))
    restarts = len(run.starts) - 1
    return [
        ("held-out accuracy", *held_out(run)),
        ("reward", course(run, "reward/mean"), "means of the first and last tenth"),
        ("steps", f"{step:,.0f}" + (f" of {total:,.0f}" if total and total != step else ""), "made and recorded"),
        ("duration", duration(run.busy_s), count(restarts, "restart") if restarts > 0 else "of the learner"),
        ("trajectories", figure(float(run.trajectories)), f"{figure(tokens)} tokens trained on"),
        ("time of a step", duration(median(steps) if (steps := run.values("step_s")) else None), "median"),
    ]


def held_out(run: RecordedRun) -> tuple[str, str]:
    """Return the first and last held-out accuracy, and a note on steps and rows."""
    scored = [(step, value) for step, value in run.held_out if value is not None]
    if not scored:
        return "-", "never evaluated"
    (first, before), (last, after) = scored[0], scored[-1]
    rows = number(run.evaluations[-1].get("rows"))
    over = f", {rows:,.0f} rows" if rows else ""
    if len(scored) == 1:
        return f"{after:.3f}", f"step {last:.0f}{over}"
    return f"{before:.3f} → {after:.3f}", f"steps {first:.0f} and {last:.0f}{over}"


def course(run: RecordedRun, key: str) -> str:
    """Return the means of the first tenth and of the last."""
    values = run.values(key)
    tenth = max(1, len(values) // 10)
    if not values:
        return "-"
    if len(values) < 3:
        return f"{values[-1]:.3f}"
    return f"{fmean(values[:tenth]):.3f} → {fmean(values[-tenth:]):.3f}"


def _step(run: RecordedRun) -> float:
    return number(run.steps[-1]["step"]) or 0.0 if run.steps else number(run.status.get("step")) or 0.0


def _health(run: RecordedRun, found: list[Finding]) -> str:
    rows = "".join(
        f'<tr class="f-{finding.level}"><td><span class="level">{finding.level}</span></td>'
        f"<td>{text(finding.what)}</td><td>{text(finding.value)}</td><td>{text(finding.advice)}</td></tr>"
        for finding in found
    )
    table = f'<table class="findings"><tbody>{rows}</tbody></table>' if rows else ""
    clear = (
        f'<p class="note">Nothing was found about {text(", ".join(checks_without_finding(run)))}.</p>'
        if run.steps
        else ""
    )
    missing = "".join(f"<li>{text(sentence)}</li>" for sentence in run.missing)
    return table + clear + (f'<ul class="missing">{missing}</ul>' if missing else "")
