"""Draw one chart as inline SVG, with the numbers behind it for the tooltips. No library, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from asyncrl.tools.report.markup import figure, text
from asyncrl.tools.report.recorded_run import Points

WIDTH, HEIGHT = 400, 168
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 8, 20
NUM_COLOURS = 8
MAX_POINTS = 400
"""Points of a curve that a screen can show."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: Points
    style: Literal["line", "faint", "dots", "bound"] = "line"
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
    show: Callable[[float | None], str] = figure,
    x_name: str = "step",
) -> str:
    """Draw curves; empty if none has a number. The axis includes `floor` and `ceiling`; `limit` is a dashed line."""
    drawn = _coloured([curve for curve in curves if any(y is not None for _, y in curve.points)])
    if not drawn:
        return ""
    drawn = [(Curve(c.name, thin(c.points), c.style), colour) for c, colour in drawn]
    numbers = [y for curve, _ in drawn for _, y in curve.points if y is not None]
    positive = [y for y in numbers if y > 0]
    logarithmic = logarithmic and bool(positive)
    low, high = (min(positive), max(positive)) if logarithmic else (min(numbers), max(numbers))
    if not logarithmic:
        low, high = min(low, floor if floor is not None else low), max(high, ceiling if ceiling is not None else high)
    xs = [x for curve, _ in drawn for x, _ in curve.points]
    axes = Axes((min(xs), max(xs)), _padded(low, high, logarithmic, floor), logarithmic)
    body = [_grid(axes, show), *(_limit(axes, limit) if limit is not None else [])]
    body += [_draw(axes, curve, colour) for curve, colour in drawn]
    legend = [(c.name, colour, show(_last(c.points)), c.style) for c, colour in drawn if c.style != "faint"]
    series = [
        {"n": c.name, "c": colour, "p": [[_short(x), None if y is None else _short(y)] for x, y in c.points]}
        for c, colour in drawn
        if c.style != "faint"
    ]
    return _figure(title, unit, legend, body, axes, series, x_name)


def stack_chart(
    title: str,
    names: Sequence[tuple[str, int | str]],
    rows: Sequence[tuple[float, ...]],
    *,
    unit: str = "",
    show: Callable[[float | None], str] = figure,
) -> str:
    """Draw areas on top of each other; a row is x and the value of each name."""
    present = [i for i in range(len(names)) if any(row[i + 1] for row in rows)]
    if not rows or not present:
        return ""
    thinned = thin_rows(rows)
    highest = max(sum(row[1:]) for row in thinned)
    axes = Axes((thinned[0][0], thinned[-1][0]), (0.0, highest * 1.05 or 1.0))
    below = [0.0] * len(thinned)
    body = [_grid(axes, show)]
    for i in present:
        above = [base + max(0.0, row[i + 1]) for base, row in zip(below, thinned, strict=True)]
        edge = [f"{axes.px(r[0]):.1f},{axes.py(y):.1f}" for r, y in zip(thinned, above, strict=True)]
        back = [f"{axes.px(r[0]):.1f},{axes.py(y):.1f}" for r, y in zip(thinned, below, strict=True)]
        body.append(f'<polygon class="area c-{names[i][1]}" points="{" ".join([*edge, *reversed(back)])}"/>')
        below = above
    legend = [(names[i][0], names[i][1], show(thinned[-1][i + 1]), "area") for i in present]
    series = [
        {"n": names[i][0], "c": names[i][1], "p": [[_short(row[0]), _short(row[i + 1])] for row in thinned]}
        for i in present
    ]
    return _figure(title, unit, legend, body, axes, series, "step")


def _coloured(curves: Sequence[Curve]) -> list[tuple[Curve, int | str]]:
    """Give each curve its colour; a faint curve has that of the next one."""
    coloured: list[tuple[Curve, int | str]] = []
    following = 0
    for curve in curves:
        given = curve.colour if curve.colour != -1 else "muted" if curve.style == "bound" else following % NUM_COLOURS
        coloured.append((curve, given))
        if curve.style in ("line", "dots") and curve.colour == -1:
            following += 1
    return coloured


def _draw(axes: Axes, curve: Curve, colour: int | str) -> str:
    """Draw a line. A point without a number interrupts it; a single number between two of those is a dot."""
    parts: list[list[str]] = [[]]
    for x, y in curve.points:
        if y is None:
            parts.append([])
        else:
            parts[-1].append(f"{axes.px(x):.1f},{axes.py(y):.1f}")
    kind = {"faint": "faint", "bound": "bound"}.get(curve.style, "line")
    marks = [f'<polyline class="{kind} c-{colour}" points="{" ".join(p)}"/>' for p in parts if len(p) > 1]
    every, radius = curve.style == "dots", 3 if curve.style == "dots" else 2
    for at in (at for part in parts if every or len(part) == 1 for at in part):
        x, y = at.split(",")
        marks.append(f'<circle class="dot c-{colour}" cx="{x}" cy="{y}" r="{radius}"/>')
    return "".join(marks)


def _padded(low: float, high: float, logarithmic: bool, floor: float | None) -> tuple[float, float]:
    if logarithmic:
        return (low / 1.3, high * 1.3) if high / low > 1.001 else (low / 3, high * 3)
    if high - low <= 1e-9 * abs(high):  # equal but for rounding
        margin = abs(high) * 0.1 or 1.0
        return (low if floor == low else low - margin, high + margin)
    margin = (high - low) * 0.06
    return (low if floor is not None and low >= floor else low - margin, high + margin)


def _grid(axes: Axes, show: Callable[[float | None], str]) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for y in _log_ticks(*axes.y) if axes.logarithmic else ticks(*axes.y, 4):
        at = axes.py(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{at + 3:.1f}" text-anchor="end">{text(show(y))}</text>')
    for x in ticks(*axes.x, 5):
        parts.append(f'<text class="tick" x="{axes.px(x):.1f}" y="{bottom + 14}" text-anchor="middle">{x:,g}</text>')
    return "".join(parts)


def _limit(axes: Axes, limit: float) -> list[str]:
    if not axes.y[0] < limit < axes.y[1]:
        return []
    at = f"{axes.py(limit):.1f}"
    return [f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>']


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


def _last(points: Points) -> float | None:
    return next((y for _, y in reversed(points) if y is not None), None)


def _short(value: float) -> float:
    """Round to five digits, enough for a tooltip."""
    return float(f"{value:.5g}")


def _figure(title, unit, legend, body, axes: Axes, series, x_name: str) -> str:
    keys = "".join(
        f'<span class="key"><i class="{style} c-{colour}"></i>{text(name)} <b>{text(value)}</b></span>'
        for name, colour, value, style in legend
    )
    data = {"x": axes.x, "l": LEFT, "w": WIDTH - LEFT - RIGHT, "W": WIDTH, "n": x_name, "s": series}
    label = text(f"{title}: {', '.join(name for name, *_ in legend)}")
    return (
        f'<figure class="chart" data-chart="{text(json.dumps(data, separators=(",", ":")))}">'
        f'<figcaption><span class="title">{text(title)}</span> <span class="unit">{text(unit)}</span>'
        f'<span class="keys">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg></figure>'
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
            value: Callable[[int], float] = lambda i: points[i][1] or 0.0  # noqa: E731
            kept.update((min(numbers, key=value), max(numbers, key=value)))
    return [points[i] for i in sorted(kept)]


def thin_rows(rows: Sequence[tuple[float, ...]], limit: int = MAX_POINTS) -> list[tuple[float, ...]]:
    """Thin rows of an x with several values, by the sum of the values."""
    totals: Points = [(float(i), sum(row[1:])) for i, row in enumerate(rows)]
    return [rows[int(index)] for index, _ in thin(totals, limit)]
