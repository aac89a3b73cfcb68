"""Compare the recorded numbers and weights of a step with those of its repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Tolerances on a GPU and over ranks, where sums have another order each time: relative to the larger number, or to 1
if both are smaller."""


@dataclass(frozen=True)
class Difference:
    """The difference of a number, or of a tensor."""

    name: str
    size: float
    """Largest absolute difference: 0 where every bit is equal, infinite where a number is missing or not finite.

    It is the smallest number there is where the bits of equal numbers differ (-0.0, NaN).
    """
    verdict: Literal["equal", "differs", "within tolerance"]
    recorded: float | None = None
    """The recorded number; None if it was not finite, or not recorded."""
    again: float | None = None
    """The number of the repetition; None if it was not finite."""


@dataclass(frozen=True)
class Comparison:
    """A step beside its repetition."""

    step: int
    tolerance: float
    """0 on a CPU, where both are the same bit for bit."""
    numbers: tuple[Difference, ...]
    weights: tuple[Difference, ...] | None = None
    """Differences by tensor; None where there is no checkpoint of the step."""

    @property
    def is_equal(self) -> bool:
        return all(difference.verdict != "differs" for difference in (*self.numbers, *(self.weights or ())))

    def table(self) -> str:
        width = max(len(d.name) for d in self.numbers)
        lines = [f"{'':{width}}  {'recorded':>24}  {'made again':>24}"]
        lines += [f"{d.name:{width}}  {d.recorded!r:>24}  {d.again!r:>24}  {d.verdict}" for d in self.numbers]
        equal = sum(d.size == 0 for d in self.numbers)
        lines.append(f"{equal} of {len(self.numbers)} numbers are equal")
        if self.weights is None:
            lines.append(f"weights: there is no checkpoint of step {self.step} to compare with")
        else:
            equal = sum(d.size == 0 for d in self.weights)
            lines.append(f"weights: {equal} of {len(self.weights)} tensors are equal, bit for bit")
            worst = sorted((d for d in self.weights if d.size), key=lambda d: -d.size)[:5]
            lines += [f"  {d.name}: largest difference {d.size:.3g}, {d.verdict}" for d in worst]
        if self.tolerance:
            lines.append(
                "on a GPU, and over ranks, sums have another order each time: what differs by up to "
                f"{self.tolerance:g} of the value counts as equal"
            )
        return "\n".join(lines)


def compare_numbers(
    recorded: Mapping[str, float | None], again: Mapping[str, float], tolerance: float = 0.0
) -> tuple[Difference, ...]:
    """Compare every number of the repetition with the recorded one."""
    differences: list[Difference] = []
    for name, value in again.items():
        before, now = _finite(recorded.get(name)), _finite(value)
        if before is None or now is None:
            size = scale = 0.0 if before is now else math.inf
        else:
            size, scale = abs(before - now), max(abs(before), abs(now))
        differences.append(_difference(name, size, scale, tolerance, before, now))
    return tuple(differences)


def compare_weights(
    recorded: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor], tolerance: float = 0.0
) -> tuple[Difference, ...]:
    """Compare the tensors of both sides, by their bits."""
    differences: list[Difference] = []
    for name in dict.fromkeys([*again, *recorded]):
        one, other = recorded.get(name), again.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            size = scale = math.inf
        elif torch.equal(_bits(one), _bits(other)):
            size = scale = 0.0
        else:
            first, second = one.detach().cpu().double(), other.detach().cpu().double()
            size = float((first - second).abs().nan_to_num(nan=math.inf, posinf=math.inf).max()) or math.ulp(0.0)
            scale = float(torch.maximum(first.abs(), second.abs()).max())
        differences.append(_difference(name, size, scale, tolerance))
    return tuple(differences)


def _difference(
    name: str, size: float, scale: float, tolerance: float, recorded: float | None = None, again: float | None = None
) -> Difference:
    close = math.isfinite(size) and size <= tolerance * max(scale, 1.0)
    verdict = "equal" if size == 0 else "within tolerance" if close else "differs"
    return Difference(name, size, verdict, recorded, again)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes: NaN is unequal to itself and 0.0 equals -0.0, so numbers do not show equal bits."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _finite(value: float | None) -> float | None:
    """Replace what is not finite by None, as metrics.jsonl does."""
    return None if value is None or not math.isfinite(value) else float(value)
