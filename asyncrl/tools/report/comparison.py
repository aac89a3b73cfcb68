"""The page of several runs: figures side by side, curves on top of each other, and where their settings differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from asyncrl.tools.report.chart import NUM_COLOURS, Curve, line_chart
from asyncrl.tools.report.charts import NOISY_FROM, components
from asyncrl.tools.report.configuration import differences
from asyncrl.tools.report.environment import describe
from asyncrl.tools.report.findings import findings, verdict
from asyncrl.tools.report.markup import duration, figure, share, text
from asyncrl.tools.report.page import course, document, held_out
from asyncrl.tools.report.run import Points, Run, number
from asyncrl.tools.report.series import moving_mean

Pick = Callable[[Run], Points]


def page_of_many(runs: Sequence[Run]) -> str:
    """A whole HTML document."""
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


def _names(runs: Sequence[Run]) -> list[str]:
    """As short as tells them apart."""
    paths = [run.path.resolve() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({i + 1})" for i, run in enumerate(runs)]


# --- figures ---------------------------------------------------------------------------------------


def _figures(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = [(name, [row(run) for run in runs]) for name, row in _ROWS.items()]
    machines = [describe(run) for run in runs]
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


def _mean_of(key: str, show: Callable[[float | None], str]) -> Callable[[Run], str]:
    def mean(run: Run) -> str:
        values = run.values(key)
        return show(sum(values) / len(values) if values else None)

    return mean


_ROWS: dict[str, Callable[[Run], str]] = {
    "ended": lambda run: run.ending or "unknown",
    "health": lambda run: verdict(run, findings(run))[1],
    "held-out accuracy": lambda run: " ".join(held_out(run)[:1]),
    "best held-out accuracy": lambda run: figure(max((v for _, v in run.held_out if v is not None), default=None)),
    "reward, first and last tenth": lambda run: course(run, "reward/mean"),
    "steps": lambda run: f"{len(run.steps):,}",
    "duration": lambda run: duration(run.busy_s),
    "trajectories": lambda run: f"{run.trajectories:,}",
    "tokens per second, learner": _mean_of("tokens_per_s/learner", figure),
    "tokens per second, rollout": _mean_of("tokens_per_s/rollout", figure),
    "learner idle": _mean_of("idle/learner", share),
    "rollout idle": _mean_of("idle/rollout", share),
    "staleness, mean": _mean_of("staleness/mean", figure),
    "effective sample size, mean": _mean_of("ess", share),
    "entropy at the end": lambda run: figure(run.last("entropy")),
}


# --- curves ----------------------------------------------------------------------------------------


def _overlay(runs: Sequence[Run], names: Sequence[str], pick: Pick, style: str = "line") -> list[Curve]:
    curves = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        points, colour = pick(run), i % NUM_COLOURS
        if style == "dots":
            curves.append(Curve(name, points, "dots", colour))
        elif len(points) < NOISY_FROM:
            curves.append(Curve(name, points, colour=colour))
        else:
            curves += [Curve(name, points, "faint", colour), Curve(name, moving_mean(points)[0], colour=colour)]
    return curves


def _key(key: str) -> Pick:
    return lambda run: run.points(key)


def _learning(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    yield line_chart("Held-out accuracy", _overlay(runs, names, lambda run: run.held_out, "dots"), show=share)
    yield line_chart("Reward", _overlay(runs, names, _key("reward/mean")), unit="mean")
    by_time = _overlay(runs, names, lambda run: _against_time(run, "reward/mean"))
    yield line_chart("Reward against time", by_time, unit="minutes since the start", x_name="minute")
    for key in dict.fromkeys(key for run in runs for key in components(run)):
        yield line_chart(f"Reward: {key.removeprefix('reward/')}", _overlay(runs, names, _key(key)))
    yield line_chart("Entropy", _overlay(runs, names, _key("entropy")), unit="nats per token", floor=0.0)
    yield line_chart("Gradient norm", _overlay(runs, names, _key("grad_norm")), floor=0.0)
    yield line_chart("Completion length", _overlay(runs, names, _key("response_length/mean")), unit="mean tokens")


def _off_policyness(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    yield line_chart("Token staleness", _overlay(runs, names, _key("staleness/mean")), unit="mean versions", floor=0.0)
    yield line_chart("Effective sample size", _overlay(runs, names, _key("ess")), ceiling=1.0, show=share)
    yield line_chart(
        "KL of behaviour and learner", _overlay(runs, names, _key("mismatch_kl_k3")), unit="nats per token"
    )
    yield line_chart(
        "Clipped", _overlay(runs, names, _key("clip_fraction")), unit="of the tokens", floor=0.0, show=share
    )


def _pipeline(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    yield line_chart("Seconds of a step", _overlay(runs, names, _key("step_s")), floor=0.0, show=duration)
    yield line_chart("Tokens per second, learner", _overlay(runs, names, _key("tokens_per_s/learner")), floor=0.0)
    yield line_chart("Tokens per second, rollout", _overlay(runs, names, _key("tokens_per_s/rollout")), floor=0.0)
    yield line_chart("Learner idle", _overlay(runs, names, _key("idle/learner")), show=share, floor=0.0, ceiling=1.0)
    yield line_chart("Memory of the learner", _overlay(runs, names, _key("rss_gib")), unit="GiB", floor=0.0)


def _against_time(run: Run, key: str) -> Points:
    """Minutes since the first thing that is known of the run."""
    began = run.clock[0] if run.clock else 0.0
    timed = [(number(step.get("time")), step) for step in run.steps if key in step]
    return sorted((((at - began) / 60, number(step[key])) for at, step in timed if at is not None), key=lambda p: p[0])
