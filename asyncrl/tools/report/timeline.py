"""Draw the lanes of activities: the whole run in slices, and a few steps in the middle as they were."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.telemetry.timeline import merge
from asyncrl.tools.numbers import duration
from asyncrl.tools.recorded_run import RecordedRun, number
from asyncrl.tools.report.activity import DEVICE_TURNS, LEARNER_ACTIVITIES, SERVER_ACTIVITIES, Lane, Spans, clip, lanes
from asyncrl.tools.report.chart import ticks
from asyncrl.tools.report.markup import text

WIDTH = 1180
LABEL = 128
LANE, GAP, AXIS = 30, 10, 22
SLICES = 350
DETAIL_STEPS = 20
MAX_SERVERS = 8
PAUSE_SHARE = 0.05
"""A standstill of all processes longer than this share of the rest is drawn short, with its length."""
PAUSE_WIDTH = 34
Window = tuple[int, int, float, float]
"""First and last step, and the Unix seconds of their beginning and end."""


@dataclass(frozen=True)
class TimeAxis:
    """Maps Unix seconds to the SVG's units, with long standstills cut short."""

    active: Spans
    left: float = LABEL
    right: float = WIDTH - 8

    @property
    def pauses(self) -> Spans:
        return [(before[1], after[0]) for before, after in pairwise(self.active)]

    @property
    def scale(self) -> float:
        """Units per second."""
        width = self.right - self.left - PAUSE_WIDTH * len(self.pauses)
        return max(width, 1.0) / (sum(b - a for a, b in self.active) or 1.0)

    def px(self, at: float) -> float:
        index = max(0, bisect_right([a for a, _ in self.active], at) - 1)
        before = sum(b - a for a, b in self.active[:index])
        since, until = self.active[index]
        return self.left + (before + min(max(at - since, 0.0), until - since)) * self.scale + PAUSE_WIDTH * index

    def at(self, running_s: float) -> float:
        """Return the moment after so many seconds in which something ran."""
        for since, until in self.active:
            if running_s <= until - since:
                return since + running_s
            running_s -= until - since
        return self.active[-1][1]


def timeline(run: RecordedRun) -> str:
    """Show the timeline as HTML."""
    drawn = lanes(run)
    if not drawn:
        return '<p class="empty">No step has recorded its time.</p>'
    servers = [lane for lane in drawn if lane.name not in ("learner", "device")]
    shown = [lane for lane in drawn if lane not in servers[MAX_SERVERS:]]
    more = len(drawn) - len(shown)
    note = f"<p class='note'>{more} more rollout servers are not shown.</p>" if more else ""
    axis = TimeAxis(_active(drawn))
    window = _middle(run)
    known = clip(axis.active, *window[2:]) if window else []
    parts = [_legend(shown), "<h3>The whole run</h3>", _overview(run, shown, axis, window)]
    if window and known:
        parts += [f"<h3>Steps {window[0]:,} to {window[1]:,}</h3>", _detail(run, shown, TimeAxis(known))]
    return "".join(parts) + note


def _active(drawn: Sequence[Lane]) -> Spans:
    """Return the time in which anything ran, in stretches between long standstills."""
    everything = merge([span for lane in drawn for spans in lane.parts.values() for span in spans])
    total = sum(until - since for since, until in everything)
    return merge(everything, max(PAUSE_SHARE * total, 1.0))


def _middle(run: RecordedRun) -> Window | None:
    """Choose the steps of the detail, in the middle of the run."""
    timed = [s for s in run.steps if number(s.get("time")) is not None and number(s.get("step_s")) is not None]
    if len(timed) < 3:
        return None
    first = max(0, len(timed) // 2 - DETAIL_STEPS // 2)
    part = timed[first : first + DETAIL_STEPS]
    since = part[0]["time"] - part[0]["step_s"]
    return int(part[0]["step"]), int(part[-1]["step"]), since, part[-1]["time"]


# --- the whole run -------------------------------------------------------------------------------


def _overview(run: RecordedRun, shown: Sequence[Lane], axis: TimeAxis, window: Window | None) -> str:
    """Draw the shares of the activities in each slice of time, as a stack per lane."""
    running_s = sum(b - a for a, b in axis.active)
    edges = [axis.at(running_s * i / SLICES) for i in range(SLICES + 1)]
    body, data = [], []
    for row, lane in enumerate(shown):
        shares = _shares(lane, edges)
        body.append(_lane_label(lane.name, row) + _stack(shares, edges, axis, _top(row)))
        data.append({"n": lane.name, "s": {what: [round(v, 3) for v in part] for what, part in shares.items()}})
    bottom = _top(len(shown)) - GAP
    body += [_pause(axis, i, bottom) for i in range(len(axis.pauses))]
    body += _clock(axis, running_s, bottom)
    if window:
        x0, x1 = axis.px(window[2]), axis.px(window[3])
        body.append(
            f'<rect class="window" x="{x0:.1f}" y="0" width="{max(x1 - x0, 2):.1f}" height="{bottom + 3}"><title>'
            "shown below</title></rect>"
        )
    slices = {"x": [round(axis.px((a + b) / 2), 1) for a, b in pairwise(edges)], "l": data}
    steps = [(axis.px(t), int(s["step"])) for s in run.steps if (t := number(s.get("time"))) is not None]
    slices["step"] = _steps_at(slices["x"], steps)
    payload = text(json.dumps(slices, separators=(",", ":")))
    return _svg(body, bottom + AXIS, f'class="lanes overview" data-slices="{payload}"', "timeline of the whole run")


def _shares(lane: Lane, edges: Sequence[float]) -> dict[str, list[float]]:
    """Compute the share of each slice, 0 to 1, by activity."""
    shares = {what: [0.0] * SLICES for what, spans in lane.parts.items() if spans}
    for what, spans in lane.parts.items():
        for since, until in spans:
            i = max(0, bisect_right(edges, since) - 1)
            while i < SLICES and edges[i] < until:
                width = edges[i + 1] - edges[i]
                if width > 0:
                    shares[what][i] += max(0.0, min(until, edges[i + 1]) - max(since, edges[i])) / width
                i += 1
    return shares


def _stack(shares: dict[str, list[float]], edges: Sequence[float], axis: TimeAxis, top: int) -> str:
    parts = []
    base = [0.0] * SLICES
    for what, part in shares.items():
        upper = [min(1.0, low + value) for low, value in zip(base, part, strict=True)]
        path = []
        for i, (low, high) in enumerate(zip(base, upper, strict=True)):
            if high - low > 1e-3:
                x0, x1 = axis.px(edges[i]), axis.px(edges[i + 1])
                y0, y1 = top + LANE * (1 - low), top + LANE * (1 - high)
                path.append(f"M{x0:.1f} {y0:.1f}V{y1:.1f}H{x1:.1f}V{y0:.1f}z")
        parts.append(f'<path class="a-{_slug(what)}" d="{"".join(path)}"/>' if path else "")
        base = upper
    return "".join(parts)


def _pause(axis: TimeAxis, index: int, bottom: int) -> str:
    since, until = axis.pauses[index]
    x = axis.px(since) + PAUSE_WIDTH / 2
    return (
        f'<text class="pause" x="{x:.1f}" y="{bottom / 2 + 3:.1f}" text-anchor="middle" transform="rotate(-90 {x:.1f} '
        f'{bottom / 2:.1f})">stopped {text(duration(until - since))}</text>'
    )


def _clock(axis: TimeAxis, running_s: float, bottom: int) -> list[str]:
    """Draw the running time, in a unit that fits."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    unit, name = next((seconds, name) for seconds, name in units if running_s > 2 * seconds or seconds == 1)
    marks = [(axis.px(axis.at(t * unit)), t) for t in ticks(0.0, running_s / unit, 8)]
    return [
        f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{t:g} {name}</text>' for x, t in marks
    ]


def _steps_at(xs: Sequence[float], steps: Sequence[tuple[float, int]]) -> list[int | None]:
    """Return the step that ends next after each slice's middle."""
    places = [x for x, _ in steps]
    return [steps[i][1] if (i := bisect_right(places, x)) < len(steps) else None for x in xs]


# --- a few steps ---------------------------------------------------------------------------------


def _detail(run: RecordedRun, shown: Sequence[Lane], axis: TimeAxis) -> str:
    since, until = axis.active[0][0], axis.active[-1][1]
    bottom = _top(len(shown)) - GAP
    body = []
    for row, lane in enumerate(shown):
        body.append(_lane_label(lane.name, row))
        for what, spans in lane.parts.items():
            for a, b in clip(spans, since, until):
                x0, x1 = axis.px(a), axis.px(b)
                tip = text(f"{what} {duration(b - a)}")
                body.append(
                    f'<rect class="a-{_slug(what)}" x="{x0:.1f}" y="{_top(row)}" width="{max(x1 - x0, 0.6):.1f}" '
                    f'height="{LANE}" data-tip="{tip}"/>'
                )
    body += [_pause(axis, i, bottom) for i in range(len(axis.pauses))]
    for step in run.steps:
        at = number(step.get("time"))
        if at is None or not since < at <= until + 1e-6:
            continue
        x = f"{axis.px(at):.1f}"
        body.append(f'<line class="boundary" x1="{x}" x2="{x}" y1="0" y2="{bottom + 4}"/>')
        body.append(f'<text class="tick" x="{x}" y="{bottom + 15}" text-anchor="end">{step["step"]:.0f}</text>')
    return _svg(body, bottom + AXIS, 'class="lanes detail"', "timeline of a few steps")


def _legend(shown: Sequence[Lane]) -> str:
    order = dict.fromkeys((*LEARNER_ACTIVITIES, *SERVER_ACTIVITIES, *DEVICE_TURNS))
    present = {what for lane in shown for what, spans in lane.parts.items() if spans}
    keys = "".join(
        f'<span class="key"><i class="swatch a-{_slug(what)}"></i>{text(what)}</span>'
        for what in order
        if what in present
    )
    return f'<p class="keys">{keys}</p>'


def _top(row: int) -> int:
    return 4 + row * (LANE + GAP)


def _lane_label(name: str, row: int) -> str:
    short = name if len(name) <= 20 else f"{name[:9]}…{name[-9:]}"
    return f'<text class="lane" x="0" y="{_top(row) + LANE / 2 + 4}">{text(short)}<title>{text(name)}</title></text>'


def _slug(what: str) -> str:
    return what.replace(" ", "-").replace("'", "")


def _svg(body: Sequence[str], height: int, attributes: str, label: str) -> str:
    inner = "".join(body) + f'<line class="cursor" y1="0" y2="{height - AXIS}"/>'
    return f'<svg {attributes} viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{inner}</svg>'
