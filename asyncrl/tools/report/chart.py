"""Draw one chart as inline SVG, with the numbers behind it for the tooltips. No library, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from asyncrl.tools.numbers import figure
from asyncrl.tools.recorded_run import Points
from asyncrl.tools.report.markup import NUM_COLOURS, text

WIDTH, HEIGHT = 400, 168
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 8, 20
MAX_POINTS = 400
"""Points of a curve that a screen can show."""
Show = Callable[[float | None], str]
"""Formats a value."""


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
    logarithmic: bool = False

    def px(self, x: float) -> float:
        low, high = self.x
        return LEFT + (x - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        low, high = (math.log10(v) for v in self.y) if self.logarithmic else self.y
        value = math.log10(max(y, self.y[0])) if self.logarithmic else y
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    logarithmic: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    limit: float | None = None,
    show: Show = figure,
    x_name: str = "step",
) -> str:
    """Draw curves; empty if none has a number. The axis includes `floor` and `ceiling`; `limit` is a dashed line."""
    drawn = _coloured([curve for curve in curves if any(y is not None for _, y in curve.points)])
    if not drawn:
        return ""
    drawn = [replace(curve, points=thin(curve.points)) for curve in drawn]
    numbers = [y for curve in drawn for _, y in curve.points if y is not None]
    positive = [y for y in numbers if y > 0]
    logarithmic = logarithmic and bool(positive)
    low, high = (min(positive), max(positive)) if logarithmic else (min(numbers), max(numbers))
    if not logarithmic:
        low, high = min(low, floor if floor is not None else low), max(high, ceiling if ceiling is not None else high)
    xs = [x for curve in drawn for x, _ in curve.points]
    axes = Axes((min(xs), max(xs)), _padded(low, high, logarithmic, floor), logarithmic)
    body = [_draw(axes, curve) for curve in drawn]
    if limit is not None and axes.y[0] < limit < axes.y[1]:
        at = f"{axes.py(limit):.1f}"
        body.insert(0, f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
    return _figure(title, unit, drawn, body, axes, show, x_name)


def stack_chart(title: str, parts: Sequence[Curve], *, unit: str = "", show: Show = figure) -> str:
    """Draw curves of the same steps, without gaps, as areas on top of each other."""
    parts = [curve for curve in parts if any(y for _, y in curve.points)]
    if not parts:
        return ""
    columns = zip(*(curve.points for curve in parts), strict=True)
    kept = [int(i) for i, _ in thin([(float(i), sum(y or 0.0 for _, y in row)) for i, row in enumerate(columns)])]
    parts = [replace(curve, points=[curve.points[i] for i in kept], style="area") for curve in parts]
    xs = [x for x, _ in parts[0].points]
    bounds = [[0.0] * len(xs)]
    for curve in parts:
        bounds.append([base + max(0.0, y or 0.0) for base, (_, y) in zip(bounds[-1], curve.points, strict=True)])
    axes = Axes((xs[0], xs[-1]), (0.0, max(bounds[-1]) * 1.05 or 1.0))
    edges = [[f"{axes.px(x):.1f},{axes.py(y):.1f}" for x, y in zip(xs, bound, strict=True)] for bound in bounds]
    body = [
        f'<polygon class="area c-{curve.colour}" points="{" ".join([*above, *reversed(below)])}"/>'
        for curve, (below, above) in zip(parts, pairwise(edges), strict=True)
    ]
    return _figure(title, unit, parts, body, axes, show, "step")


def _coloured(curves: Sequence[Curve]) -> list[Curve]:
    """Give each curve its colour; a faint curve has that of the next one."""
    coloured: list[Curve] = []
    following = 0
    for curve in curves:
        given = curve.colour if curve.colour != -1 else "muted" if curve.style == "bound" else following % NUM_COLOURS
        coloured.append(replace(curve, colour=given))
        if curve.style in ("line", "dots") and curve.colour == -1:
            following += 1
    return coloured


def _draw(axes: Axes, curve: Curve) -> str:
    """Draw a line. A point without a number interrupts it; a single number between two of those is a dot."""
    parts: list[list[str]] = [[]]
    for x, y in curve.points:
        if y is None:
            parts.append([])
        else:
            parts[-1].append(f"{axes.px(x):.1f},{axes.py(y):.1f}")
    kind = "line" if curve.style == "dots" else curve.style
    marks = [f'<polyline class="{kind} c-{curve.colour}" points="{" ".join(p)}"/>' for p in parts if len(p) > 1]
    every, radius = curve.style == "dots", 3 if curve.style == "dots" else 2
    for at in (at for part in parts if every or len(part) == 1 for at in part):
        x, y = at.split(",")
        marks.append(f'<circle class="dot c-{curve.colour}" cx="{x}" cy="{y}" r="{radius}"/>')
    return "".join(marks)


def _padded(low: float, high: float, logarithmic: bool, floor: float | None) -> tuple[float, float]:
    if logarithmic:
        return (low / 1.3, high * 1.3) if high / low > 1.001 else (low / 3, high * 3)
    if high - low <= 1e-9 * abs(high):  # equal but for rounding
        margin = abs(high) * 0.1 or 1.0
        return (low if floor == low else low - margin, high + margin)
    margin = (high - low) * 0.06
    return (low if floor is not None and low >= floor else low - margin, high + margin)


def _grid(axes: Axes, show: Show) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for y in _log_ticks(*axes.y) if axes.logarithmic else ticks(*axes.y, 4):
        at = axes.py(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{at + 3:.1f}" text-anchor="end">{text(show(y))}</text>')
    for x in ticks(*axes.x, 5):
        parts.append(f'<text class="tick" x="{axes.px(x):.1f}" y="{bottom + 14}" text-anchor="middle">{x:,g}</text>')
    return "".join(parts)


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


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    if len(powers) < 2:
        return ticks(low, high, 4)
    every = math.ceil(len(powers) / 4)
    return [10.0**power for power in powers][::every]


def _short(value: float) -> float:
    """Round to five digits, enough for a tooltip."""
    return float(f"{value:.5g}")


def _figure(
    title: str, unit: str, curves: Sequence[Curve], body: Sequence[str], axes: Axes, show: Show, x_name: str
) -> str:
    """Frame what is drawn with axes, a legend that tells the last values, and the numbers for the tooltips."""
    named = [curve for curve in curves if curve.style != "faint"]
    last = {c.name: show(next((y for _, y in reversed(c.points) if y is not None), None)) for c in named}
    keys = "".join(
        f'<span class="key"><i class="{c.style} c-{c.colour}"></i>{text(c.name)} <b>{text(last[c.name])}</b></span>'
        for c in named
    )
    series = [
        {"n": c.name, "c": c.colour, "p": [[_short(x), None if y is None else _short(y)] for x, y in c.points]}
        for c in named
    ]
    data = {"x": axes.x, "l": LEFT, "w": WIDTH - LEFT - RIGHT, "W": WIDTH, "n": x_name, "s": series}
    label = text(f"{title}: {', '.join(last)}")
    return (
        f'<figure class="chart" data-chart="{text(json.dumps(data, separators=(",", ":")))}">'
        f'<figcaption><span class="title">{text(title)}</span> <span class="unit">{text(unit)}</span>'
        f'<span class="keys">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'{_grid(axes, show)}{"".join(body)}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg></figure>'
    )


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """Keep at most `limit` points: the lowest and the highest of each of equal slices, and the first and last of all.

    One point without a number stays in each slice, so that a gap remains a gap.
    """
    if len(points) <= limit:
        return points
    slices = max(1, (limit - 2) // 3)
    kept: set[int] = {0, len(points) - 1}
    for first, end in pairwise(round(i * len(points) / slices) for i in range(slices + 1)):
        numbers = [i for i in range(first, end) if points[i][1] is not None]
        gaps = [i for i in range(first, end) if points[i][1] is None]
        kept.update(gaps[:1])
        if numbers:
            values = [points[i][1] or 0.0 for i in numbers]
            kept.update(numbers[values.index(extreme)] for extreme in (min(values), max(values)))
    return [points[i] for i in sorted(kept)]
