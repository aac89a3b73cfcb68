"""Curves thinned out to what a screen shows, without losing the extremes that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from asyncrl.tools.report.run import Points

MAX_POINTS = 400


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """At most `limit` points: of each of equal slices the lowest and the highest, with the first and the last of all.

    A point without a number stays one per slice, so that a gap remains a gap.
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
    """As `thin`, of an x with several values: by their sum."""
    totals: Points = [(float(i), sum(row[1:])) for i, row in enumerate(rows)]
    return [rows[int(index)] for index, _ in thin(totals, limit)]


def moving_mean(points: Points) -> tuple[Points, int]:
    """Over a twentieth of the run around each point, and how many points that is. Gaps do not count."""
    numbers = [(x, y) for x, y in points if y is not None]
    half = max(1, len(numbers) // 40)
    sums = [0.0]
    for _, y in numbers:
        sums.append(sums[-1] + y)
    smooth: Points = []
    for i, (x, _) in enumerate(numbers):
        first, end = max(0, i - half), min(len(numbers), i + half + 1)
        smooth.append((x, (sums[end] - sums[first]) / (end - first)))
    return smooth, 2 * half + 1


def slope(points: Points) -> float | None:
    """Of the least-squares line, per step; None for fewer than three numbers."""
    numbers = [(x, y) for x, y in points if y is not None]
    if len(numbers) < 3:
        return None
    mean_x = sum(x for x, _ in numbers) / len(numbers)
    mean_y = sum(y for _, y in numbers) / len(numbers)
    spread = sum((x - mean_x) ** 2 for x, _ in numbers)
    return sum((x - mean_x) * (y - mean_y) for x, y in numbers) / spread if spread else None
