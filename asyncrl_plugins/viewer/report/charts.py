"""The charts of one run, in groups, and of several runs on top of each other.

What a run has not recorded leaves no empty chart behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from asyncrl_plugins.viewer.numbers import duration, figure, share
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import THRESHOLDS
from asyncrl_plugins.viewer.recorded_run.run import Points, RecordedRun, number
from asyncrl_plugins.viewer.report.chart import Curve, Drawing, Show, line_chart, stack_chart
from asyncrl_plugins.viewer.report.markup import NUM_COLOURS

NOISY_FROM = 60
"""Points from which on a noisy curve gets a moving mean."""
NOISE = 6.0
"""A curve is noisy if it goes so many times as far up and down as its range is wide."""
MAX_CURVES = 8
COLOURS = {"finished": "good", "truncated": "truncated", "timed_out": "timed", "error": "bad"} | {
    name: name for name in ("waiting", "learning", "publishing")
}
_GIB = 2.0**30
Groups = list[tuple[str, list[Drawing]]]


@dataclass(frozen=True)
class Chart:
    title: str
    keys: str
    """`key: name` of each curve, or a pattern of keys whose groups are the names."""
    unit: str = ""
    show: Show = figure
    floor: float | None = 0.0
    ceiling: float | None = None
    limit: str = ""
    """Name of an alert, or key of a setting, whose value is a dashed line."""
    divisor: float = 1.0
    compared: int = 1
    """Curves, the first ones, that are compared with those of other runs."""
    is_stacked: bool = False

    def names(self, run: RecordedRun) -> dict[str, str]:
        """Return the names of the curves by key."""
        if ":" in self.keys.replace("?:", ""):
            return dict(pair.split(": ") for pair in self.keys.split(", "))
        found = {key: match for key in run.keys if (match := re.fullmatch(self.keys, key))}
        return {key: " ".join(filter(None, found[key].groups())) for key in list(found)[:MAX_CURVES]}

    def points(self, run: RecordedRun, key: str) -> Points:
        return [(x, None if y is None else y / self.divisor) for x, y in run.points(key)]


IDLE = "idle/learner: learner, idle/rollout: rollout servers"
RATIOS = "ratio/p50: median, ratio/p01: p1, ratio/p99: p99, ratio_max: largest"
CLIPPED = "clip_fraction: clipped, mask_fraction: masked, truncation_fraction: cut"
LEARNERS_TURNS = "asleep_s/learner: asleep, sleep_s/learner: falling asleep, wake_s/learner: waking up"
SERVERS_TURNS = "sleep_s/rollout: falling asleep, wake_s/rollout: waking up"
HELD_OUT_BY_VALUE = "Held-out accuracy by evaluation.by"
CHARTS = {
    "Learning": (
        Chart("Reward", "reward/mean: mean, baseline/reward: greedy", "weighted sum", floor=None),
        Chart("Reward by component", "reward/(?!mean$|std$)(.+)", floor=None, compared=MAX_CURVES),
        Chart("Accuracy", "accuracy: training", show=share, ceiling=1.0),
        Chart(HELD_OUT_BY_VALUE, "accuracy/(.+)", show=share, ceiling=1.0, compared=0),
        Chart("Entropy", "entropy: entropy", "nats per token", limit="EntropyCollapse"),
        Chart("Loss", "loss: loss", "nats", floor=None),
        Chart("Gradient norm", "grad_norm: before clipping"),
        Chart(
            "Completion length",
            "response_length/mean: mean, response_length/max: longest",
            "tokens",
            limit="data.max_response_length",
        ),
        Chart("Trajectories by status", "rows/(.+)", "per step", compared=0, is_stacked=True),
        Chart("Groups that teach nothing", "zero_variance_groups: groups", "zero variance"),
        Chart("Groups dropped by filters", "filtered_share: of those sampled", show=share, ceiling=1.0),
        Chart("Groups from the replay buffer", "replayed_groups: groups", "of a batch"),
        Chart("Dropped groups by reason", "dropped/(.+)", "so far", compared=0),
        Chart("KL to the reference", "reference_kl: reference, kl_prcp: masked images", "nats per token"),
        Chart("Learning rate", "lr: rate, critic/lr: critic's"),
        Chart("Demonstrations", "inserted/logprob: log-prob, loss/supervised: part of the loss", floor=None),
        Chart("Weight of demonstrations", "supervised_weight: of -log p"),
        Chart("Critic", "critic/explained_variance: explained variance, critic/loss: loss", floor=None),
    ),
    "Agents": (
        Chart("Turns", "env/turns: mean, env/turns_max: most"),
        Chart("Calls", "env/calls: calls", "per trajectory"),
        Chart("Mistakes", "env/call_error_rate: of the calls, env/error_rate: trajectories lost", "", share, 0.0, 1.0),
        Chart("Ends", "env/ends/(done|turns|tokens|failed)", "trajectories per step", compared=0, is_stacked=True),
        Chart("Reward by calls", "env/reward_with_calls: with, env/reward_without_calls: without", floor=None),
        Chart("Shown by the environment", "env/observed_share: of the tokens", "", share, 0.0, 1.0),
    ),
    "Off-policyness": (
        Chart("Token staleness", "staleness/mean: mean, staleness/max: oldest, staleness/bound: bound", "versions"),
        Chart("Effective sample size", "ess: all tokens", "", share, None, 1.0, "EffectiveSampleSizeCollapse"),
        Chart("KL of behaviour and learner", "mismatch_kl_k3: k3", "nats per token", floor=None, limit="MismatchKl"),
        Chart("Ratio learner / behaviour", RATIOS, "raw", floor=None),
        Chart("Clipped, masked, cut to the cap", CLIPPED, "of the tokens", share),
        Chart("Log-prob of learner - engine", "logprob_diff_max: largest", "nats", floor=None),
        Chart("Effective sample size by staleness", "staleness_(.+)/ess", "", share, None, 1.0, compared=0),
    ),
    "Pipeline": (
        Chart("Tokens per second", IDLE.replace("idle", "tokens_per_s"), compared=2),
        Chart("Idle", IDLE, "of the time", share, ceiling=1.0, compared=2),
        Chart("Time of a step", "step_s: all of it", show=duration),
        Chart(
            "Seconds of a step",
            "wait_s: waiting, learn_s: learning, publish_s: publishing",
            show=duration,
            compared=0,
            is_stacked=True,
        ),
        Chart("The learner's turns", LEARNERS_TURNS, "seconds of a step", duration),
        Chart("The server's turns", SERVERS_TURNS, "seconds of a step", duration),
        Chart("Mean length of groups", "length/(trained|dropped|buffered)", "tokens", compared=0),
        Chart("Tokens per step", "tokens: of trajectories"),
    ),
    "Resources": (
        Chart("Memory of the learner", "(.+)_gib/?(.*)", "GiB", compared=MAX_CURVES),
        Chart("Moved off the device to sleep", "sleep_bytes/(.+)", "GiB", divisor=_GIB, compared=0),
        Chart("Published weights", "publish_bytes: one version", "GiB", divisor=_GIB),
        Chart("Model FLOPs utilisation", "mfu: of the device's peak", show=share),
    ),
}


def charts_of_run(run: RecordedRun) -> Groups:
    """Return titles and charts, without empty groups."""
    return _groups(lambda chart: [_stack(run, chart) if chart.is_stacked else _lines(run, chart)])


def charts_of_runs(runs: Mapping[str, RecordedRun]) -> Groups:
    """Draw the curves of several runs on top of each other, each run in its colour."""

    def compared(chart: Chart) -> Iterable[Drawing | None]:
        names = {key: name for run in runs.values() for key, name in chart.names(run).items()}
        for key, name in list(names.items())[: chart.compared]:
            curves = {run_name: chart.points(run, key) for run_name, run in runs.items()}
            title = f"{chart.title}: {name}" if chart.compared > 1 else chart.title
            unit = chart.unit if chart.compared > 1 or len(names) == 1 else f"{name} {chart.unit}"
            yield _overlaid(title, curves, unit=unit, **_axes(chart, *runs.values()))
        if chart.title == "Reward":
            in_time = {name: _against_time(run, "reward/mean") for name, run in runs.items()}
            yield _overlaid("Reward against time", in_time, unit="minutes since the start", x_name="minute")
            held_out = [
                Curve(name, run.held_out, "dots", i % NUM_COLOURS) for i, (name, run) in enumerate(runs.items())
            ]
            yield line_chart("Held-out accuracy", held_out, show=share)

    return _groups(compared)


def _groups(draw: Callable[[Chart], Iterable[Drawing | None]]) -> Groups:
    drawn = {title: [one for chart in charts for one in draw(chart) if one] for title, charts in CHARTS.items()}
    return [(title, charts) for title, charts in drawn.items() if charts]


def _lines(run: RecordedRun, chart: Chart) -> Drawing | None:
    named = chart.names(run)
    curves = []
    for key, name in named.items():
        points = chart.points(run, key)
        curves += [Curve(name, points, "bound")] if name == "bound" else _with_mean(name, points, len(named) < 3)
    if chart.title == "Accuracy":
        curves.append(Curve("held out", run.held_out, "dots"))
    if chart.title == "Loss":
        curves.append(
            Curve("held out", [(float(e["step"]), number(e["loss"])) for e in run.evaluations if "loss" in e], "dots")
        )
    if chart.title == HELD_OUT_BY_VALUE:
        curves += [Curve(label, points) for label, points in list(run.held_out_by_label.items())[:MAX_CURVES]]
    return line_chart(chart.title, curves, unit=chart.unit, changes=run.changed_at, **_axes(chart, run))


def _stack(run: RecordedRun, chart: Chart) -> Drawing | None:
    """Stack the values of all steps that have any of the keys; 0 where a step lacks one."""
    named = chart.names(run)
    steps = [step for step in run.steps if not named.keys().isdisjoint(step)]
    parts = [
        Curve(name, [(step["step"], number(step.get(key)) or 0.0) for step in steps], colour=COLOURS.get(name, 5))
        for key, name in named.items()
    ]
    return stack_chart(chart.title, parts, unit=chart.unit, show=chart.show)


def _overlaid(title: str, points: Mapping[str, Points], **axes: Any) -> Drawing | None:
    numbered = enumerate(points.items())
    return line_chart(title, [c for i, (n, p) in numbered for c in _with_mean(n, p, colour=i % NUM_COLOURS)], **axes)


def _axes(chart: Chart, *runs: RecordedRun) -> dict[str, Any]:
    limit = THRESHOLDS[chart.limit].value if chart.limit in THRESHOLDS else number(runs[0].setting(chart.limit))
    return {"floor": chart.floor, "ceiling": chart.ceiling, "limit": limit, "show": chart.show}


def _with_mean(name: str, points: Points, is_smooth: bool = True, colour: int | str = -1) -> list[Curve]:
    """Return a curve, and above one that is long and noisy its moving mean."""
    values = [y for _, y in points if y is not None]
    ups_and_downs = sum(abs(after - before) for before, after in pairwise(values))
    if not is_smooth or len(values) < NOISY_FROM or ups_and_downs < NOISE * (max(values) - min(values)):
        return [Curve(name, points, colour=colour)]
    return [Curve(name, points, "faint", colour), Curve(name, moving_mean(points), colour=colour)]


def moving_mean(points: Points) -> Points:
    """Average over a twentieth of the run around each point. Gaps do not count."""
    numbers = [(x, y) for x, y in points if y is not None]
    half = max(1, len(numbers) // 40)
    sums = [0.0, *accumulate(y for _, y in numbers)]
    smooth: Points = []
    for i, (x, _) in enumerate(numbers):
        first, end = max(0, i - half), min(len(numbers), i + half + 1)
        smooth.append((x, (sums[end] - sums[first]) / (end - first)))
    return smooth


def _against_time(run: RecordedRun, key: str) -> Points:
    """Return the values of a key by the minutes since the first record of the run."""
    timed = [(number(step.get("time")), step) for step in run.steps if key in step]
    began = run.began or 0.0
    return sorted((((at - began) / 60, number(step[key])) for at, step in timed if at is not None), key=lambda p: p[0])
