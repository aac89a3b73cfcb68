"""Lay out the lanes of activities as SVG: the whole run in slices, and a few steps in the middle as they were."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from asyncrl.telemetry.timeline import merge
from asyncrl_plugins.viewer.numbers import duration
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun, number
from asyncrl_plugins.viewer.report.activity import (
    DEVICE_TURNS,
    LEARNER_ACTIVITIES,
    SERVER_ACTIVITIES,
    Lane,
    Spans,
    clip,
    lanes,
)
from asyncrl_plugins.viewer.report.chart import ticks

WIDTH = 1180
LABEL = 128
LANE, GAP = 30, 10
SLICES = 350
DETAIL_STEPS = 20
MAX_SERVERS = 8
PAUSE_SHARE = 0.05
"""A standstill of all processes longer than this share of the rest is drawn short, with its length."""
PAUSE_WIDTH = 34
DIGIT = 7
"""Width of a label's digit."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class TimeAxis:
    """Maps Unix seconds to the SVG's units, with long standstills, which lie between `active` spans, cut short."""

    def __init__(self, active: Spans):
        self.active = active
        self._pauses = [(before[1], after[0]) for before, after in pairwise(active)]
        lengths = [step for since, until in active for step in (until - since, 0.0)][:-1]
        self.running_s = sum(lengths)
        scale = max(WIDTH - 8 - LABEL - PAUSE_WIDTH * len(self._pauses), 1.0) / (self.running_s or 1.0)
        widths = [PAUSE_WIDTH if i % 2 else length * scale for i, length in enumerate(lengths)]
        self._moments = np.ravel(active)
        self._running = np.cumsum([0.0, *lengths])
        self._px = np.cumsum([LABEL, *widths])

    def px(self, at: Any) -> Any:
        """Return the place of a moment, or of an array of moments."""
        return np.interp(at, self._moments, self._px)

    def at(self, running_s: Any) -> Any:
        """Return the moment after so many seconds in which something ran."""
        return np.interp(running_s, self._running, self._moments)

    def pauses(self) -> list[tuple[float, str]]:
        return [(self.px((since + until) / 2), duration(until - since)) for since, until in self._pauses]


def timeline(run: RecordedRun) -> dict[str, Any]:
    """Lay out the timeline; no pictures if nothing has recorded its time."""
    drawn = lanes(run)
    servers = [lane for lane in drawn if lane.name not in ("learner", "device")]
    shown = [lane for lane in drawn if lane not in servers[MAX_SERVERS:]]
    present = {what for lane in shown for what, spans in lane.parts.items() if spans}
    order = dict.fromkeys((*LEARNER_ACTIVITIES, *SERVER_ACTIVITIES, *DEVICE_TURNS))
    pictures = []
    if drawn:
        everything = merge([span for lane in drawn for spans in lane.parts.values() for span in spans])
        total = sum(until - since for since, until in everything)
        axis = TimeAxis(merge(everything, max(PAUSE_SHARE * total, 1.0)))
        steps = _middle(run)
        known = clip(axis.active, steps[0]["time"] - steps[0]["step_s"], steps[-1]["time"]) if steps else []
        pictures = [_overview(run, shown, axis, known)]
        if known:
            title = f"Steps {steps[0]['step']:,.0f} to {steps[-1]['step']:,.0f}"
            pictures.append(_detail(title, run, shown, TimeAxis(known)))
    return {
        "pictures": pictures,
        "lanes": [(lane.name, 4 + row * (LANE + GAP)) for row, lane in enumerate(shown)],
        "bottom": 4 + len(shown) * (LANE + GAP) - GAP,
        "activities": [what for what in order if what in present],
        "more": len(drawn) - len(shown),
    }


def _middle(run: RecordedRun) -> list[dict[str, Any]]:
    """Choose the steps of the detail, in the middle of the run."""
    timed = [s for s in run.steps if number(s.get("time")) is not None and number(s.get("step_s")) is not None]
    first = max(0, len(timed) // 2 - DETAIL_STEPS // 2)
    return timed[first : first + DETAIL_STEPS] if len(timed) > 2 else []


def _overview(run: RecordedRun, shown: Sequence[Lane], axis: TimeAxis, window: Spans) -> dict[str, Any]:
    """Draw the shares of the activities in each slice of time, as a stack per lane."""
    edges = axis.at(np.linspace(0.0, axis.running_s, SLICES + 1))
    shares = [_shares(lane, edges) for lane in shown]
    unit_s, unit = next((seconds, name) for seconds, name in UNITS if axis.running_s > 2 * seconds or seconds == 1)
    xs = [round(x, 1) for x in axis.px((edges[1:] + edges[:-1]) / 2).tolist()]
    ends = [(axis.px(at), int(step["step"])) for step in run.steps if (at := number(step.get("time"))) is not None]
    slices = {
        "x": xs,
        "l": [{"n": lane.name, "s": part} for lane, part in zip(shown, shares, strict=True)],
        "step": [ends[i][1] if (i := bisect_right(ends, x, key=lambda end: end[0])) < len(ends) else None for x in xs],
    }
    return {
        "kind": "overview",
        "title": "The whole run",
        "slices": json.dumps(slices, separators=(",", ":")),
        "marks": [_areas(part, axis.px(edges)) for part in shares],
        "pauses": axis.pauses(),
        "ticks": [(axis.px(axis.at(t * unit_s)), f"{t:g} {unit}") for t in ticks(0.0, axis.running_s / unit_s, 8)],
        "window": (axis.px(window[0][0]), axis.px(window[-1][1])) if window else (),
        "ends": [],
    }


def _shares(lane: Lane, edges: np.ndarray) -> dict[str, list[float]]:
    """Compute the share of each slice, 0 to 1, by activity."""
    shares = {}
    for what, spans in lane.parts.items():
        if spans:
            covered_s = np.cumsum([seconds for since, until in spans for seconds in (0.0, until - since)])
            covered = np.diff(np.interp(edges, np.ravel(spans), covered_s)) / np.maximum(np.diff(edges), 1e-9)
            shares[what] = covered.round(3).tolist()
    return shares


def _areas(shares: dict[str, list[float]], xs: np.ndarray) -> list[tuple[str, str]]:
    """Return activities and their SVG paths, relative to a lane of the height and depth LANE."""
    bounds = LANE * (1 - np.minimum(1.0, np.cumsum([[0.0] * SLICES, *shares.values()], axis=0)))
    areas = []
    for what, below, above in zip(shares, bounds[:-1], bounds[1:], strict=True):
        bars = [i for i in range(SLICES) if below[i] - above[i] > 0.03]
        path = (f"M{xs[i]:.1f} {below[i]:.1f}V{above[i]:.1f}H{xs[i + 1]:.1f}V{below[i]:.1f}z" for i in bars)
        areas.append((what, "".join(path)))
    return areas


def _detail(title: str, run: RecordedRun, shown: Sequence[Lane], axis: TimeAxis) -> dict[str, Any]:
    """Draw each span of a few steps."""
    since, until = axis.active[0][0], axis.active[-1][1]
    spans = [[(what, *span) for what in lane.parts for span in clip(lane.parts[what], since, until)] for lane in shown]
    timed = [(at, step["step"]) for step in run.steps if (at := number(step.get("time"))) is not None]
    return {
        "kind": "detail",
        "title": title,
        "slices": "",
        "marks": [[(what, axis.px(a), axis.px(b), duration(b - a)) for what, a, b in row] for row in spans],
        "pauses": axis.pauses(),
        "ticks": [],
        "window": (),
        "ends": _labelled([(axis.px(at), f"{step:.0f}") for at, step in timed if since < at <= until + 1e-6]),
    }


def _labelled(ends: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leave out labels that would stand on the one before; their lines stay."""
    kept, free = [], 0.0
    for x, label in ends:
        shown = x - DIGIT * len(label) >= free  # it ends at x
        kept.append((x, label if shown else ""))
        free = x + DIGIT / 2 if shown else free
    return kept
