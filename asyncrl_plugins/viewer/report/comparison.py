"""The page of several runs: figures side by side, curves on top of each other, and where their settings differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.launch.display import scored_alike
from asyncrl_plugins.viewer.numbers import duration, figure, share
from asyncrl_plugins.viewer.recorded_run.learning import HELD_OUT, TRAINING, courses
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun, number
from asyncrl_plugins.viewer.report.charts import charts_of_runs
from asyncrl_plugins.viewer.report.markup import render
from asyncrl_plugins.viewer.report.settings import differences, facts_of_start
from asyncrl_plugins.viewer.report.verdict import all_findings, verdict

FIGURES: dict[str, Callable[[RecordedRun], str]] = {
    "ended": lambda run: run.ending or "unknown",
    "health": lambda run: verdict(run, all_findings(run))[1],
    HELD_OUT: lambda run: _ends(run, HELD_OUT),
    "best held-out accuracy": lambda run: figure(
        max((v for e in scored_alike(run.evaluations) if (v := number(e.get("accuracy"))) is not None), default=None)
    ),
    TRAINING: lambda run: _ends(run, TRAINING),
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
    names = _names(runs)
    groups = charts_of_runs(dict(zip(names, runs, strict=True)))
    return render(
        "many_runs.html",
        title=" and ".join(names[:3]),
        titles=["Figures", *(title for title, _ in groups), "Configuration"],
        runs=runs,
        names=names,
        figures=_figures(runs),
        groups=groups,
        differences=differences(runs),
    )


def _ends(run: RecordedRun, name: str) -> str:
    """Return a score at the start of a run and at its end."""
    return next((course.ends for course in courses(run) if course.name == name), "-")


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
