"""The page of several runs: figures side by side, curves on top of each other, and where their settings differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.tools.report.chart import NUM_COLOURS, Curve, line_chart
from asyncrl.tools.report.charts import components, noisy, with_mean
from asyncrl.tools.report.findings import findings, verdict
from asyncrl.tools.report.markup import document, duration, figure, share, text
from asyncrl.tools.report.page import course, held_out
from asyncrl.tools.report.recorded_run import Points, RecordedRun, number
from asyncrl.tools.report.settings import differences, facts_of_start


def page_of_many(runs: Sequence[RecordedRun]) -> str:
    """Build the page of several runs."""
    names = _names(runs)
    sections = [("Figures", _figures(runs, names))]
    for title, charts in (("Learning", _learning), ("Off-policyness", _off_policyness), ("Pipeline", _pipeline)):
        drawn = [chart for chart in charts(runs, names) if chart]
        if drawn:
            sections.append((title, f'<div class="charts">{"".join(drawn)}</div>'))
    sections.append(("Configuration", f"<p class='about'>Only what differs.</p>{differences(runs)}"))
    keys = "".join(
        f'<span class="key"><i class="line c-{i % NUM_COLOURS}"></i>{text(name)}</span>' for i, name in enumerate(names)
    )
    head = f'<header class="top"><h1>{len(runs)} runs</h1><p class="keys runs">{keys}</p></header>'
    return document(" and ".join(names[:3]), head, sections)


def _names(runs: Sequence[RecordedRun]) -> list[str]:
    """Shorten the runs' paths to names that still differ."""
    paths = [run.path.resolve() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({i + 1})" for i, run in enumerate(runs)]


# --- figures ---------------------------------------------------------------------------------------


def _figures(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    rows = [(name, [row(run) for run in runs]) for name, row in _ROWS.items()]
    machines = [facts_of_start(run) for run in runs]
    for name in dict.fromkeys(name for machine in machines for name in machine):
        values = [machine.get(name, "-") for machine in machines]
        if len({value for value, machine in zip(values, machines, strict=True) if machine}) > 1:
            rows.append((name, values))
    head = "".join(f'<th><i class="line c-{i % NUM_COLOURS}"></i>{text(name)}</th>' for i, name in enumerate(names))
    body = "".join(
        f"<tr><td>{text(name)}</td>{''.join(f'<td>{text(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f'<table class="figures"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'


_ROWS: dict[str, Callable[[RecordedRun], str]] = {
    "ended": lambda run: run.ending or "unknown",
    "health": lambda run: verdict(run, findings(run))[1],
    "held-out accuracy": lambda run: " ".join(held_out(run)[:1]),
    "best held-out accuracy": lambda run: figure(max((v for _, v in run.held_out if v is not None), default=None)),
    "reward, first and last tenth": lambda run: course(run, "reward/mean"),
    "steps": lambda run: f"{len(run.steps):,}",
    "duration": lambda run: duration(run.busy_s),
    "trajectories": lambda run: f"{run.trajectories:,}",
    "tokens per second, learner": lambda run: figure(run.mean("tokens_per_s/learner")),
    "tokens per second, rollout": lambda run: figure(run.mean("tokens_per_s/rollout")),
    "learner idle": lambda run: share(run.mean("idle/learner")),
    "rollout idle": lambda run: share(run.mean("idle/rollout")),
    "staleness, mean": lambda run: figure(run.mean("staleness/mean")),
    "effective sample size, mean": lambda run: share(run.mean("ess")),
    "entropy at the end": lambda run: figure(run.last("entropy")),
}


# --- curves ----------------------------------------------------------------------------------------


def _learning(runs: Sequence[RecordedRun], names: Sequence[str]) -> Iterator[str]:
    held_out = [Curve(name, run.held_out, "dots", i % NUM_COLOURS) for i, (run, name) in _numbered(runs, names)]
    yield line_chart("Held-out accuracy", held_out, show=share)
    yield _chart(runs, names, "Reward", "reward/mean", unit="mean")
    by_time = [
        curve
        for i, (run, name) in _numbered(runs, names)
        for curve in with_mean(name, _against_time(run, "reward/mean"), i % NUM_COLOURS)
    ]
    yield line_chart("Reward against time", by_time, unit="minutes since the start", x_name="minute")
    for key in dict.fromkeys(key for run in runs for key in components(run)):
        yield _chart(runs, names, f"Reward: {key.removeprefix('reward/')}", key)
    yield _chart(runs, names, "Entropy", "entropy", unit="nats per token", floor=0.0)
    yield _chart(runs, names, "Gradient norm", "grad_norm", floor=0.0)
    yield _chart(runs, names, "Completion length", "response_length/mean", unit="mean tokens")


def _off_policyness(runs: Sequence[RecordedRun], names: Sequence[str]) -> Iterator[str]:
    yield _chart(runs, names, "Token staleness", "staleness/mean", unit="mean versions", floor=0.0)
    yield _chart(runs, names, "Effective sample size", "ess", ceiling=1.0, show=share)
    yield _chart(runs, names, "KL of behaviour and learner", "mismatch_kl_k3", unit="nats per token")
    yield _chart(runs, names, "Clipped", "clip_fraction", unit="of the tokens", floor=0.0, show=share)


def _pipeline(runs: Sequence[RecordedRun], names: Sequence[str]) -> Iterator[str]:
    yield _chart(runs, names, "Seconds of a step", "step_s", floor=0.0, show=duration)
    yield _chart(runs, names, "Tokens per second, learner", "tokens_per_s/learner", floor=0.0)
    yield _chart(runs, names, "Tokens per second, rollout", "tokens_per_s/rollout", floor=0.0)
    yield _chart(runs, names, "Learner idle", "idle/learner", show=share, floor=0.0, ceiling=1.0)
    yield _chart(runs, names, "Memory of the learner", "rss_gib", unit="GiB", floor=0.0)


def _chart(runs: Sequence[RecordedRun], names: Sequence[str], title: str, key: str, **axes: Any) -> str:
    """Draw the curves of one key on top of each other, each run in its colour."""
    curves = [noisy(run, key, name, i % NUM_COLOURS) for i, (run, name) in _numbered(runs, names)]
    return line_chart(title, [curve for of_run in curves for curve in of_run], **axes)


def _numbered(runs: Sequence[RecordedRun], names: Sequence[str]) -> Iterator[tuple[int, tuple[RecordedRun, str]]]:
    return enumerate(zip(runs, names, strict=True))


def _against_time(run: RecordedRun, key: str) -> Points:
    """Return the values of a key by the minutes since the first record of the run."""
    began = run.clock[0] if run.clock else 0.0
    timed = [(number(step.get("time")), step) for step in run.steps if key in step]
    return sorted((((at - began) / 60, number(step[key])) for at, step in timed if at is not None), key=lambda p: p[0])
