"""The page of several runs: figures side by side, curves on top of each other, and where their settings differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.tools.findings import findings, verdict
from asyncrl.tools.numbers import duration, figure, share
from asyncrl.tools.recorded_run import Points, RecordedRun, number
from asyncrl.tools.report.chart import Curve, line_chart
from asyncrl.tools.report.charts import components, with_mean
from asyncrl.tools.report.markup import NUM_COLOURS, render
from asyncrl.tools.report.page import course, held_out
from asyncrl.tools.report.settings import differences, facts_of_start

Charts = tuple[tuple[str, str, dict[str, Any]], ...]
"""Title, key and axes of charts."""
LEARNING: Charts = (
    ("Entropy", "entropy", {"unit": "nats per token", "floor": 0.0}),
    ("Gradient norm", "grad_norm", {"floor": 0.0}),
    ("Completion length", "response_length/mean", {"unit": "mean tokens"}),
)
OFF_POLICYNESS: Charts = (
    ("Token staleness", "staleness/mean", {"unit": "mean versions", "floor": 0.0}),
    ("Effective sample size", "ess", {"ceiling": 1.0, "show": share}),
    ("KL of behaviour and learner", "mismatch_kl_k3", {"unit": "nats per token"}),
    ("Clipped", "clip_fraction", {"unit": "of the tokens", "floor": 0.0, "show": share}),
)
PIPELINE: Charts = (
    ("Seconds of a step", "step_s", {"floor": 0.0, "show": duration}),
    ("Tokens per second, learner", "tokens_per_s/learner", {"floor": 0.0}),
    ("Tokens per second, rollout", "tokens_per_s/rollout", {"floor": 0.0}),
    ("Learner idle", "idle/learner", {"show": share, "floor": 0.0, "ceiling": 1.0}),
    ("Memory of the learner", "rss_gib", {"unit": "GiB", "floor": 0.0}),
)
FIGURES: dict[str, Callable[[RecordedRun], str]] = {
    "ended": lambda run: run.ending or "unknown",
    "health": lambda run: verdict(run, findings(run))[1],
    "held-out accuracy": lambda run: held_out(run)[0],
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


def page_of_many(runs: Sequence[RecordedRun]) -> str:
    """Build the page of several runs."""
    named = dict(zip(_names(runs), runs, strict=True))
    charts = {
        "Learning": [*_rewards(named), *_charts(named, LEARNING)],
        "Off-policyness": _charts(named, OFF_POLICYNESS),
        "Pipeline": _charts(named, PIPELINE),
    }
    groups = [(title, list(filter(None, drawn))) for title, drawn in charts.items() if any(drawn)]
    return render(
        "many_runs.html",
        title=" and ".join(list(named)[:3]),
        titles=["Figures", *(title for title, _ in groups), "Configuration"],
        runs=runs,
        names=list(named),
        figures=_figures(runs),
        groups=groups,
        differences=differences(runs),
    )


def _names(runs: Sequence[RecordedRun]) -> list[str]:
    """Shorten the runs' paths to names that still differ."""
    paths = [run.path.resolve() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({i + 1})" for i, run in enumerate(runs)]


def _figures(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the figures of each run, and the facts of their machines that differ."""
    rows = [(name, [value_of(run) for run in runs]) for name, value_of in FIGURES.items()]
    machines = [facts_of_start(run) for run in runs]
    for name in dict.fromkeys(name for machine in machines for name in machine):
        if len({machine.get(name, "-") for machine in machines if machine}) > 1:
            rows.append((name, [machine.get(name, "-") for machine in machines]))
    return rows


def _charts(named: dict[str, RecordedRun], charts: Charts) -> list[str]:
    return [
        _chart({name: run.points(key) for name, run in named.items()}, title, **axes) for title, key, axes in charts
    ]


def _rewards(named: dict[str, RecordedRun]) -> Iterator[str]:
    held_out = [Curve(name, run.held_out, "dots", i % NUM_COLOURS) for i, (name, run) in enumerate(named.items())]
    yield line_chart("Held-out accuracy", held_out, show=share)
    yield from _charts(named, (("Reward", "reward/mean", {"unit": "mean"}),))
    by_time = {name: _against_time(run, "reward/mean") for name, run in named.items()}
    yield _chart(by_time, "Reward against time", unit="minutes since the start", x_name="minute")
    keys = dict.fromkeys(key for run in named.values() for key in components(run))
    yield from _charts(named, tuple((f"Reward: {key.removeprefix('reward/')}", key, {}) for key in keys))


def _chart(points: dict[str, Points], title: str, **axes: Any) -> str:
    """Draw curves on top of each other, each run in its colour."""
    numbered = enumerate(points.items())
    return line_chart(title, [curve for i, (n, p) in numbered for curve in with_mean(n, p, i % NUM_COLOURS)], **axes)


def _against_time(run: RecordedRun, key: str) -> Points:
    """Return the values of a key by the minutes since the first record of the run."""
    began = run.began or 0.0
    timed = [(number(step.get("time")), step) for step in run.steps if key in step]
    return sorted((((at - began) / 60, number(step[key])) for at, step in timed if at is not None), key=lambda p: p[0])
