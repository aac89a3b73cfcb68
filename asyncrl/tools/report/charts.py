"""The charts of one run, in groups. What a run has not recorded leaves no empty chart behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from asyncrl.telemetry.alert_thresholds import THRESHOLDS
from asyncrl.tools.report.chart import Curve, line_chart, stack_chart
from asyncrl.tools.report.markup import duration, share
from asyncrl.tools.report.recorded_run import Points, RecordedRun, number

NOISY_FROM = 60
"""Points from which on a noisy curve gets a moving mean."""
STATUS_COLOURS = {"finished": "good", "truncated": "truncated", "timed_out": "timed", "error": "bad"}
_SHARE = {"floor": 0.0, "ceiling": 1.0, "show": share}


def chart_groups(run: RecordedRun) -> list[tuple[str, list[str]]]:
    """Return titles and charts, without empty groups."""
    makers = {
        "Learning": _learning,
        "Off-policyness": _off_policyness,
        "Pipeline": _pipeline,
        "Resources": _resources,
    }
    drawn = {title: [chart for chart in make(run) if chart] for title, make in makers.items()}
    return [(title, charts) for title, charts in drawn.items() if charts]


def noisy(run: RecordedRun, key: str, name: str, colour: int | str = -1) -> list[Curve]:
    """Return the curve of a key, and if it is long its moving mean above it."""
    return with_mean(name, run.points(key), colour)


def with_mean(name: str, points: Points, colour: int | str = -1) -> list[Curve]:
    if len(points) < NOISY_FROM:
        return [Curve(name, points, colour=colour)]
    return [Curve(name, points, "faint", colour), Curve(name, moving_mean(points), colour=colour)]


def plain(run: RecordedRun, *names: tuple[str, str]) -> list[Curve]:
    return [Curve(name, run.points(key)) for key, name in names]


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
    yield line_chart("Reward", noisy(run, "reward/mean", "mean"), unit="weighted sum")
    parts = [curve for key in components(run) for curve in noisy(run, key, key.removeprefix("reward/"))]
    yield line_chart("Reward by component", parts)
    accuracy = [*noisy(run, "accuracy", "training"), Curve("held out", run.held_out, "dots")]
    yield line_chart("Accuracy", accuracy, **_SHARE)
    entropy = [Curve("entropy", run.points("entropy"))]
    yield line_chart("Entropy", entropy, unit="nats per token", floor=0.0, limit=THRESHOLDS["EntropyCollapse"].value)
    yield line_chart("Loss", noisy(run, "loss", "loss"), unit="nats")
    norm = noisy(run, "grad_norm", "before clipping")
    yield line_chart("Gradient norm", norm, floor=0.0, logarithmic=_spans_decades(run, "grad_norm"))
    lengths = plain(run, ("response_length/mean", "mean"), ("response_length/max", "longest"))
    longest = number(run.setting("data.max_response_length"))
    yield line_chart("Completion length", lengths, unit="tokens", floor=0.0, limit=longest)
    yield _rows(run)
    zero = noisy(run, "zero_variance_groups", "groups")
    yield line_chart("Groups that teach nothing", zero, unit="zero variance", floor=0.0)
    yield line_chart("KL to the reference", plain(run, ("reference_kl", "k3")), unit="nats per token", floor=0.0)
    yield line_chart("Learning rate", plain(run, ("lr", "rate")), floor=0.0)


def _rows(run: RecordedRun) -> str:
    keys = [key for key in run.keys if key.startswith("rows/")]
    names = [key.removeprefix("rows/") for key in keys]
    rows = [(float(s["step"]), *(number(s.get(key)) or 0.0 for key in keys)) for s in run.steps]
    coloured = [(name.replace("_", " "), STATUS_COLOURS.get(name, 5)) for name in names]
    return stack_chart("Trajectories by status", coloured, rows, unit="per step")


def _off_policyness(run: RecordedRun) -> Iterator[str]:
    bound = Curve("bound", run.points("staleness/bound"), "bound")
    stale = plain(run, ("staleness/mean", "mean"), ("staleness/max", "oldest"))
    yield line_chart("Token staleness", [*stale, bound], unit="versions", floor=0.0)
    ess = noisy(run, "ess", "all tokens")
    limit = THRESHOLDS["EffectiveSampleSizeCollapse"].value
    yield line_chart("Effective sample size", ess, limit=limit, ceiling=1.0, show=share)
    kl = noisy(run, "mismatch_kl_k3", "k3")
    logarithmic = _spans_decades(run, "mismatch_kl_k3")
    title = "KL of behaviour and learner"
    limit = THRESHOLDS["MismatchKl"].value
    yield line_chart(title, kl, unit="nats per token", limit=limit, logarithmic=logarithmic)
    ratios = plain(run, ("ratio/p01", "p1"), ("ratio/p50", "median"), ("ratio/p99", "p99"), ("ratio_max", "largest"))
    yield line_chart("Ratio learner / behaviour", ratios, unit="raw", logarithmic=_spans_decades(run, "ratio_max"))
    clipped = plain(run, ("clip_fraction", "clipped"), ("mask_fraction", "masked"), ("truncation_fraction", "cut"))
    yield line_chart("Clipped, masked, cut to the cap", clipped, unit="of the tokens", floor=0.0, show=share)
    largest = noisy(run, "logprob_diff_max", "largest")
    yield line_chart("Log-prob of learner - engine", largest, unit="nats", logarithmic=True)
    yield line_chart("Effective sample size by staleness", _by_staleness(run, "ess"), ceiling=1.0, show=share)


def _by_staleness(run: RecordedRun, name: str) -> list[Curve]:
    keys = [key for key in run.keys if key.startswith("staleness_") and key.endswith(f"/{name}")]
    if len(keys) < 2:
        return []
    return [Curve(key.removeprefix("staleness_").partition("/")[0], run.points(key)) for key in sorted(keys)[:8]]


def _pipeline(run: RecordedRun) -> Iterator[str]:
    rate = [*noisy(run, "tokens_per_s/learner", "learner"), *noisy(run, "tokens_per_s/rollout", "rollout servers")]
    yield line_chart("Tokens per second", rate, floor=0.0)
    idle = [*noisy(run, "idle/learner", "learner"), *noisy(run, "idle/rollout", "rollout servers")]
    yield line_chart("Idle", idle, unit="of the time", **_SHARE)
    yield _seconds(run)
    turns = ("asleep_s/learner", "asleep"), ("sleep_s/learner", "falling asleep"), ("wake_s/learner", "waking up")
    yield line_chart("The learner's turns", plain(run, *turns), unit="seconds of a step", floor=0.0, show=duration)
    turns = ("sleep_s/rollout", "falling asleep"), ("wake_s/rollout", "waking up")
    yield line_chart("The server's turns", plain(run, *turns), unit="seconds of a step", floor=0.0, show=duration)
    lengths = plain(run, ("length/trained", "trained"), ("length/dropped", "dropped"), ("length/buffered", "buffered"))
    yield line_chart("Mean length of groups", lengths, unit="tokens", floor=0.0)
    yield line_chart("Tokens per step", noisy(run, "tokens", "trained"), floor=0.0)


def _seconds(run: RecordedRun) -> str:
    """Stack the seconds of waiting, learning and publishing of each step."""
    keys = ("wait_s", "learn_s", "publish_s")
    rows = [(float(s["step"]), *(number(s.get(key)) or 0.0 for key in keys)) for s in run.steps if keys[1] in s]
    names = [("waiting", "waiting"), ("learning", "learning"), ("publishing", "publishing")]
    return stack_chart("Seconds of a step", names, rows, show=duration)


def _resources(run: RecordedRun) -> Iterator[str]:
    memory = [key for key in run.keys if key.endswith("_gib") or "_gib/" in key]
    named = [(key, "resident" if key == "rss_gib" else key.replace("_gib", "").replace("/", " ")) for key in memory]
    yield line_chart("Memory of the learner", plain(run, *named), unit="GiB", floor=0.0)
    moved = [Curve(name, _gib(run, f"sleep_bytes/{side}")) for name, side in (("learner",) * 2, ("server", "rollout"))]
    yield line_chart("Moved off the device to sleep", moved, unit="GiB", floor=0.0)
    version = [Curve("one version", _gib(run, "publish_bytes"))]
    yield line_chart("Published weights", version, unit="GiB", floor=0.0)
    yield line_chart("Model FLOPs utilisation", plain(run, ("mfu", "of the device's peak")), floor=0.0, show=share)


def _gib(run: RecordedRun, key: str) -> Points:
    return [(x, None if y is None else y / 2**30) for x, y in run.points(key)]


def _spans_decades(run: RecordedRun, key: str) -> bool:
    """Return whether a linear axis would hide most of a curve."""
    positive = sorted(value for value in run.values(key) if value > 0)
    return len(positive) > 4 and positive[-1] > 30 * positive[len(positive) // 2]
