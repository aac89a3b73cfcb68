"""The charts of one run, in groups. What a run has not recorded leaves no empty chart behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from asyncrl.telemetry.alert_thresholds import THRESHOLDS
from asyncrl.tools.numbers import duration, share
from asyncrl.tools.recorded_run import Points, Record, RecordedRun, number
from asyncrl.tools.report.chart import Curve, line_chart, stack_chart

NOISY_FROM = 60
"""Points from which on a noisy curve gets a moving mean."""
STATUS_COLOURS = {"finished": "good", "truncated": "truncated", "timed_out": "timed", "error": "bad"}
_SHARE = {"floor": 0.0, "ceiling": 1.0, "show": share}


def chart_groups(run: RecordedRun) -> list[tuple[str, list[str]]]:
    """Return titles and charts, without empty groups."""
    makers = {"Learning": _learning, "Off-policyness": _off_policyness, "Pipeline": _pipeline, "Resources": _resources}
    drawn = {title: [chart for chart in make(run) if chart] for title, make in makers.items()}
    return [(title, charts) for title, charts in drawn.items() if charts]


def noisy(run: RecordedRun, *named: tuple[str, str]) -> list[Curve]:
    """Return curves of keys with names, and above each that is long its moving mean."""
    return [curve for key, name in named for curve in with_mean(name, run.points(key))]


def with_mean(name: str, points: Points, colour: int | str = -1) -> list[Curve]:
    if len(points) < NOISY_FROM:
        return [Curve(name, points, colour=colour)]
    return [Curve(name, points, "faint", colour), Curve(name, moving_mean(points), colour=colour)]


def plain(run: RecordedRun, *named: tuple[str, str]) -> list[Curve]:
    return [Curve(name, run.points(key)) for key, name in named]


def components(run: RecordedRun) -> list[str]:
    """Return the keys of the rewards' components."""
    return [key for key in run.keys if key.startswith("reward/") and key not in ("reward/mean", "reward/std")]


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


def _learning(run: RecordedRun) -> Iterator[str]:
    yield line_chart("Reward", noisy(run, ("reward/mean", "mean")), unit="weighted sum")
    parts = ((key, key.removeprefix("reward/")) for key in components(run))
    yield line_chart("Reward by component", noisy(run, *parts))
    accuracy = [*noisy(run, ("accuracy", "training")), Curve("held out", run.held_out, "dots")]
    yield line_chart("Accuracy", accuracy, **_SHARE)
    limit = THRESHOLDS["EntropyCollapse"].value
    yield line_chart("Entropy", plain(run, ("entropy", "entropy")), unit="nats per token", floor=0.0, limit=limit)
    yield line_chart("Loss", noisy(run, ("loss", "loss")), unit="nats")
    norm = noisy(run, ("grad_norm", "before clipping"))
    yield line_chart("Gradient norm", norm, floor=0.0, logarithmic=_spans_decades(run, "grad_norm"))
    lengths = plain(run, ("response_length/mean", "mean"), ("response_length/max", "longest"))
    longest = number(run.setting("data.max_response_length"))
    yield line_chart("Completion length", lengths, unit="tokens", floor=0.0, limit=longest)
    statuses = [key.removeprefix("rows/") for key in run.keys if key.startswith("rows/")]
    rows = [
        Curve(s.replace("_", " "), _of_every_step(run.steps, f"rows/{s}"), colour=STATUS_COLOURS.get(s, 5))
        for s in statuses
    ]
    yield stack_chart("Trajectories by status", rows, unit="per step")
    zero = noisy(run, ("zero_variance_groups", "groups"))
    yield line_chart("Groups that teach nothing", zero, unit="zero variance", floor=0.0)
    yield line_chart("KL to the reference", plain(run, ("reference_kl", "k3")), unit="nats per token", floor=0.0)
    yield line_chart("Learning rate", plain(run, ("lr", "rate")), floor=0.0)


def _off_policyness(run: RecordedRun) -> Iterator[str]:
    bound = Curve("bound", run.points("staleness/bound"), "bound")
    stale = plain(run, ("staleness/mean", "mean"), ("staleness/max", "oldest"))
    yield line_chart("Token staleness", [*stale, bound], unit="versions", floor=0.0)
    limit = THRESHOLDS["EffectiveSampleSizeCollapse"].value
    yield line_chart("Effective sample size", noisy(run, ("ess", "all tokens")), limit=limit, ceiling=1.0, show=share)
    kl, limit = noisy(run, ("mismatch_kl_k3", "k3")), THRESHOLDS["MismatchKl"].value
    logarithmic = _spans_decades(run, "mismatch_kl_k3")
    yield line_chart("KL of behaviour and learner", kl, unit="nats per token", limit=limit, logarithmic=logarithmic)
    ratios = plain(run, ("ratio/p01", "p1"), ("ratio/p50", "median"), ("ratio/p99", "p99"), ("ratio_max", "largest"))
    yield line_chart("Ratio learner / behaviour", ratios, unit="raw", logarithmic=_spans_decades(run, "ratio_max"))
    clipped = plain(run, ("clip_fraction", "clipped"), ("mask_fraction", "masked"), ("truncation_fraction", "cut"))
    yield line_chart("Clipped, masked, cut to the cap", clipped, unit="of the tokens", floor=0.0, show=share)
    largest = noisy(run, ("logprob_diff_max", "largest"))
    yield line_chart("Log-prob of learner - engine", largest, unit="nats", logarithmic=True)
    keys = sorted(key for key in run.keys if key.startswith("staleness_") and key.endswith("/ess"))
    by_staleness = plain(run, *((key, key.removeprefix("staleness_").partition("/")[0]) for key in keys[:8]))
    if len(keys) > 1:
        yield line_chart("Effective sample size by staleness", by_staleness, ceiling=1.0, show=share)


def _pipeline(run: RecordedRun) -> Iterator[str]:
    rate = noisy(run, ("tokens_per_s/learner", "learner"), ("tokens_per_s/rollout", "rollout servers"))
    yield line_chart("Tokens per second", rate, floor=0.0)
    idle = noisy(run, ("idle/learner", "learner"), ("idle/rollout", "rollout servers"))
    yield line_chart("Idle", idle, unit="of the time", **_SHARE)
    timed = [step for step in run.steps if "learn_s" in step]
    spent = (("waiting", "wait_s"), ("learning", "learn_s"), ("publishing", "publish_s"))
    seconds = [Curve(name, _of_every_step(timed, key), colour=name) for name, key in spent]
    yield stack_chart("Seconds of a step", seconds, show=duration)
    turns = ("asleep_s/learner", "asleep"), ("sleep_s/learner", "falling asleep"), ("wake_s/learner", "waking up")
    yield line_chart("The learner's turns", plain(run, *turns), unit="seconds of a step", floor=0.0, show=duration)
    turns = ("sleep_s/rollout", "falling asleep"), ("wake_s/rollout", "waking up")
    yield line_chart("The server's turns", plain(run, *turns), unit="seconds of a step", floor=0.0, show=duration)
    lengths = plain(run, ("length/trained", "trained"), ("length/dropped", "dropped"), ("length/buffered", "buffered"))
    yield line_chart("Mean length of groups", lengths, unit="tokens", floor=0.0)
    yield line_chart("Tokens per step", noisy(run, ("tokens", "trained")), floor=0.0)


def _resources(run: RecordedRun) -> Iterator[str]:
    memory = [key for key in run.keys if key.endswith("_gib") or "_gib/" in key]
    named = [(key, "resident" if key == "rss_gib" else key.replace("_gib", "").replace("/", " ")) for key in memory]
    yield line_chart("Memory of the learner", plain(run, *named), unit="GiB", floor=0.0)
    moved = [Curve(name, _gib(run, f"sleep_bytes/{side}")) for name, side in (("learner",) * 2, ("server", "rollout"))]
    yield line_chart("Moved off the device to sleep", moved, unit="GiB", floor=0.0)
    yield line_chart("Published weights", [Curve("one version", _gib(run, "publish_bytes"))], unit="GiB", floor=0.0)
    yield line_chart("Model FLOPs utilisation", plain(run, ("mfu", "of the device's peak")), floor=0.0, show=share)


def _of_every_step(steps: Sequence[Record], key: str) -> Points:
    """Return the values of a key, 0 where a step has none."""
    return [(float(step["step"]), number(step.get(key)) or 0.0) for step in steps]


def _gib(run: RecordedRun, key: str) -> Points:
    return [(x, None if y is None else y / 2**30) for x, y in run.points(key)]


def _spans_decades(run: RecordedRun, key: str) -> bool:
    """Return whether a linear axis would hide most of a curve."""
    positive = sorted(value for value in run.values(key) if value > 0)
    return len(positive) > 4 and positive[-1] > 30 * positive[len(positive) // 2]
