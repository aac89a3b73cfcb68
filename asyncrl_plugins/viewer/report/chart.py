"""Lay out one chart as SVG: its marks, its axes, and the numbers behind it for the tooltips. No library, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from asyncrl_plugins.viewer.numbers import figure
from asyncrl_plugins.viewer.recorded_run.run import Points
from asyncrl_plugins.viewer.report.markup import NUM_COLOURS

WIDTH, HEIGHT = 400, 168
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 8, 20
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "floor": HEIGHT - BOTTOM}
MAX_POINTS = 400
"""Points of a curve that a screen can show."""
Show = Callable[[float | None], str]
"""Formats a value."""
Drawing = dict[str, Any]
"""Context of templates/chart.html."""
Mark = tuple[str, str, str]
"""SVG element, class and points."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: Points
    style: Literal["line", "faint", "dots", "bound", "area"] = "line"
    """`faint` lies under the curve that follows it, has no legend, and shares its colour; `bound` is dashed."""
    colour: int | str = -1
    """A number of the palette, or a name of report.css; -1: the next number."""


@dataclass(frozen=True)
class Axes:
    """Maps values to the SVG's units."""

    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, x: float) -> float:
        low, high = self.x
        return LEFT + (x - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (y - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
        return f"{self.px(x):.1f},{self.py(y):.1f}"


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    floor: float | None = None,
    ceiling: float | None = None,
    limit: float | None = None,
    show: Show = figure,
    x_name: str = "step",
    changes: Sequence[float] = (),
) -> Drawing | None:
    """Draw curves; None if none has a number. The axis includes `floor` and `ceiling`; `limit` is a dashed line, and
    those of `changes`, where a new part of the run begins, are upright."""
    drawn = [
        replace(curve, points=thin(curve.points))
        for curve in _coloured([curve for curve in curves if any(y is not None for _, y in curve.points)])
    ]
    if not drawn:
        return None
    numbers = [y for curve in drawn for _, y in curve.points if y is not None]
    low = min([*numbers, floor] if floor is not None else numbers)
    high = max([*numbers, ceiling] if ceiling is not None else numbers)
    xs = [x for curve in drawn for x, _ in curve.points]
    axes = Axes((min(xs), max(xs)), _padded(low, high, floor))
    marks = [mark for curve in drawn for mark in _marks(axes, curve)]
    limit = limit if limit is not None and axes.y[0] < limit < axes.y[1] else None
    return _drawing(title, unit, drawn, marks, axes, show, x_name, limit, changes)


def stack_chart(title: str, parts: Sequence[Curve], *, unit: str = "", show: Show = figure) -> Drawing | None:
    """Draw curves of the same steps, without gaps, as areas on top of each other."""
    parts = [curve for curve in parts if any(y for _, y in curve.points)]
    if not parts:
        return None
    columns = zip(*(curve.points for curve in parts), strict=True)
    kept = [int(i) for i, _ in thin([(float(i), sum(y or 0.0 for _, y in row)) for i, row in enumerate(columns)])]
    parts = [replace(curve, points=[curve.points[i] for i in kept], style="area") for curve in parts]
    xs = [x for x, _ in parts[0].points]
    heights = [[max(0.0, y or 0.0) for _, y in curve.points] for curve in parts]
    bounds = np.cumsum([[0.0] * len(xs), *heights], axis=0).tolist()
    axes = Axes((xs[0], xs[-1]), (0.0, max(bounds[-1]) * 1.05 or 1.0))
    edges = [[axes.point(x, y) for x, y in zip(xs, bound, strict=True)] for bound in bounds]
    marks: list[Mark] = [
        ("polygon", f"area c-{curve.colour}", " ".join([*above, *reversed(below)]))
        for curve, (below, above) in zip(parts, pairwise(edges), strict=True)
    ]
    return _drawing(title, unit, parts, marks, axes, show)


def _coloured(curves: Sequence[Curve]) -> list[Curve]:
    """Give each curve its colour; a faint curve has that of the next one."""
    coloured: list[Curve] = []
    following = 0
    for curve in curves:
        given = curve.colour if curve.colour != -1 else "muted" if curve.style == "bound" else following % NUM_COLOURS
        coloured.append(replace(curve, colour=given))
        following += curve.style in ("line", "dots") and curve.colour == -1
    return coloured


def _marks(axes: Axes, curve: Curve) -> list[Mark]:
    """Draw a line. A point without a number interrupts it; a single number between two of those is a dot."""
    parts: list[list[str]] = [[]]
    for x, y in curve.points:
        if y is None:
            parts.append([])
        else:
            parts[-1].append(axes.point(x, y))
    has_dots = curve.style == "dots"
    line = f"{'line' if has_dots else curve.style} c-{curve.colour}"
    dot = f"{'dots' if has_dots else 'dot'} c-{curve.colour}"
    dots = [("circle", dot, at) for part in parts if has_dots or len(part) == 1 for at in part]
    return [*(("polyline", line, " ".join(part)) for part in parts if len(part) > 1), *dots]


def _padded(low: float, high: float, floor: float | None) -> tuple[float, float]:
    if high - low <= 1e-9 * abs(high):  # equal but for rounding
        margin = abs(high) * 0.1 or 1.0
        return (low if floor == low else low - margin, high + margin)
    margin = (high - low) * 0.06
    return (low if floor is not None and low >= floor else low - margin, high + margin)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Choose round numbers within the range, about as many as wanted."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low] if math.isfinite(low) else []
    raw = span / wanted
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * m for m in (1, 2, 5, 10) if magnitude * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)][: 4 * wanted]


def _drawing(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    axes: Axes,
    show: Show,
    x_name: str = "step",
    limit: float | None = None,
    changes: Sequence[float] = (),
) -> Drawing:
    """Add axes, a legend that tells the last values, and the numbers for the tooltips."""
    named = [curve for curve in curves if curve.style != "faint"]
    last = [show(next((y for _, y in reversed(curve.points) if y is not None), None)) for curve in named]
    series = [{"n": curve.name, "p": [(_short(x), _short(y)) for x, y in curve.points]} for curve in named]
    data = {"x": axes.x, "l": LEFT, "w": WIDTH - LEFT - RIGHT, "n": x_name, "s": series}
    return {
        "title": title,
        "unit": unit,
        "frame": FRAME,
        "limit": None if limit is None else axes.py(limit),
        "changes": [axes.px(x) for x in changes],
        "keys": list(zip(named, last, strict=True)),
        "data": json.dumps(data, separators=(",", ":")),
        "marks": marks,
        "x_ticks": [(axes.px(x), f"{x:,g}") for x in ticks(*axes.x, 5)],
        "y_ticks": [(axes.py(y), show(y)) for y in ticks(*axes.y, 4)],
    }


def _short(value: float | None) -> float | None:
    """Round to five digits, enough for a tooltip."""
    return None if value is None else float(f"{value:.5g}")


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """Keep at most `limit` points: the lowest and the highest of each of equal slices, and the first and last of all.

    One point without a number stays in each slice, so that a gap remains a gap.
    """
    if len(points) <= limit:
        return points
    kept = {0, len(points) - 1}
    for part in np.array_split(np.arange(len(points)), max(1, (limit - 2) // 3)):
        numbers = {int(i): value for i in part if (value := points[i][1]) is not None}
        kept.update([int(i) for i in part if points[i][1] is None][:1])
        if numbers:
            kept.update((min(numbers, key=lambda i: numbers[i]), max(numbers, key=lambda i: numbers[i])))
    return [points[i] for i in sorted(kept)]
