"""Boxes and points in text, as shares of the image's width and height, and how well boxes agree."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.rewards.sample import RewardSample

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1. It has no area where x1 <= x0 or y1 <= y0."""
Scale = float | Literal["pixels"]
"""Unit of a coordinate: 1 for shares of the image, 1000 for thousandths, or pixels of the row's first image."""

_N = r"\s*[-+]?(?:\d+\.?\d*|\.\d+)\s*"
_BOX = re.compile(rf"[\[(]({_N}),({_N})(?:,|[\])]\s*,\s*[\[(])({_N}),({_N})[\])]")


def box_in(text: str) -> Box | None:
    """The first `[a, b, c, d]`, `(a, b, c, d)` or `(a, b), (c, d)` in a text; None without one."""
    found = _BOX.search(text)
    return _box([float(number) for number in found.groups()]) if found else None


def reference_box(value: Any, row_id: str) -> Box:
    """A row's own box: four numbers, or their text. ValueError for anything else and for a box without area."""
    box = box_in(value) if isinstance(value, str) else coordinates(value, 4)
    if box is None or area(_box(box)) <= 0:
        raise ValueError(f"row {row_id}: expected a box [x0, y0, x1, y1] with an area, got {value!r:.120}")
    return _box(box)


def coordinates(value: Any, count: int) -> tuple[float, ...] | None:
    """Finite numbers of a list of the given length; None for anything else."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in value):
        return None
    return tuple(map(float, value))


def image_size(sample: RewardSample, scale: Scale) -> tuple[float, float]:
    """Width and height of the whole image in units of `scale`."""
    if scale != "pixels":
        return float(scale), float(scale)
    from PIL import Image

    if not sample.images:
        raise ValueError(f"row {sample.row_id}: coordinates are in pixels, but there is no image")
    with Image.open(io.BytesIO(sample.images[0])) as image:  # reads the size, not the pixels
        return float(image.width), float(image.height)


def shares(numbers: Sequence[float], size: tuple[float, float]) -> tuple[float, ...]:
    """x and y in turn, each over the image's width or height."""
    return tuple(number / size[place % 2] for place, number in enumerate(numbers))


def area(box: Sequence[float]) -> float:
    x0, y0, x1, y1 = box
    return max(0.0, x1 - x0) * max(0.0, y1 - y0)


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union; 0 where both have no area."""
    both = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - both
    return both / union if union > 0 else 0.0


def _box(numbers: Sequence[float]) -> Box:
    x0, y0, x1, y1 = numbers
    return x0, y0, x1, y1
