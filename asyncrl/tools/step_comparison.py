"""Compare the recorded numbers and weights of a step with those of its repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Tolerances on a GPU, where sums have no fixed order: relative to the larger number, or to 1 if both are smaller."""
NOT_OF_THE_STEP = {
    "step", "version", "time", "uptime_s", "step_s", "wait_s", "learn_s", "publish_s", "publish_bytes",
    "model_flops_per_s", "cpu_threads", "ledger_residual", "length_bias", "lease_fence", "rss_gib",
}  # fmt: skip
"""Names that are recorded with each step, and no result of it."""
_NOT_OF_THE_STEP = ("idle/", "tokens_per_s/", "length/", "sleep_", "wake_", "asleep_", "device_gib/")
"""Beginnings of more such names."""
Verdict = Literal["equal", "differs", "within tolerance"]


@dataclass(frozen=True)
class Difference:
    """The difference of a number, or of a tensor."""

    name: str
    recorded: float | None
    """The recorded number; None if it was not finite, or not recorded."""
    again: float | None
    """The number of the repetition; None if it was not finite, or not made."""
    size: float
    """Largest absolute difference: 0 where every bit is equal, infinite where one side has no number.

    It is the smallest number there is where the bits of equal numbers differ (-0.0, NaN).
    """
    relative: float
    """The size, relative to the larger of both numbers or to 1."""


@dataclass(frozen=True)
class Comparison:
    """A step beside its repetition."""

    step: int
    device: str
    dtype: str
    numbers: tuple[Difference, ...]
    weights: tuple[Difference, ...] | None = None
    """Differences by tensor; None where there is no checkpoint of the step."""

    def verdict(self, difference: Difference) -> Verdict:
        if difference.size == 0:
            return "equal"
        close = self.device != "cpu" and difference.relative <= TOLERANCE[self.dtype]
        return "within tolerance" if close else "differs"

    @property
    def is_equal(self) -> bool:
        """Whether everything is equal: bit for bit on a CPU, within the tolerance elsewhere."""
        return all(self.verdict(difference) != "differs" for difference in (*self.numbers, *(self.weights or ())))

    def table(self) -> str:
        width = max(len(d.name) for d in self.numbers)
        lines = [f"{'':{width}}  {'recorded':>24}  {'made again':>24}"]
        lines += [
            f"{d.name:{width}}  {_shown(d.recorded):>24}  {_shown(d.again):>24}  {self.verdict(d)}"
            for d in self.numbers
        ]
        equal = sum(d.size == 0 for d in self.numbers)
        lines.append(f"{equal} of {len(self.numbers)} numbers are equal")
        if self.weights is None:
            lines.append(f"weights: there is no checkpoint of step {self.step} to compare with")
        else:
            equal = sum(d.size == 0 for d in self.weights)
            lines.append(f"weights: {equal} of {len(self.weights)} tensors are equal, bit for bit")
            worst = sorted((d for d in self.weights if d.size), key=lambda d: -d.size)[:5]
            lines += [f"  {d.name}: largest difference {d.size:.3g}, {self.verdict(d)}" for d in worst]
        if self.device != "cpu":
            lines.append(
                f"on {self.device} sums have no fixed order: what differs by up to {TOLERANCE[self.dtype]:g} of the "
                f"value ({self.dtype}) counts as equal"
            )
        return "\n".join(lines)


def compare_numbers(recorded: Mapping[str, float | None], again: Mapping[str, float]) -> tuple[Difference, ...]:
    """Compare the numbers of the repetition, and the recorded ones that it lacks."""
    names = [*again, *(name for name in recorded if name not in again and is_result(name))]
    return tuple(_number(name, _finite(recorded.get(name)), _finite(again.get(name))) for name in names)


def is_result(name: str) -> bool:
    """Return whether a number is a result of the step alone, and not of clocks, other processes or earlier steps."""
    return name not in NOT_OF_THE_STEP and not name.startswith(_NOT_OF_THE_STEP)


def compare_weights(recorded: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]) -> tuple[Difference, ...]:
    names = [*again, *(name for name in recorded if name not in again)]
    return tuple(_tensor(name, recorded.get(name), again.get(name)) for name in names)


def _number(name: str, recorded: float | None, again: float | None) -> Difference:
    if recorded is None or again is None:
        size = 0.0 if recorded is again else math.inf
        return Difference(name, recorded, again, size, size)
    size = abs(recorded - again)
    return Difference(name, recorded, again, size, size / max(abs(recorded), abs(again), 1.0))


def _tensor(name: str, recorded: torch.Tensor | None, again: torch.Tensor | None) -> Difference:
    if recorded is None or again is None or recorded.shape != again.shape or recorded.dtype != again.dtype:
        return Difference(name, None, None, math.inf, math.inf)
    one, other = recorded.detach().cpu(), again.detach().cpu()
    if torch.equal(_bits(one), _bits(other)):
        return Difference(name, None, None, 0.0, 0.0)
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    gaps = (one - other).abs()[~same]
    size = float(gaps.max()) if len(gaps) else math.ulp(0.0)
    if math.isnan(size):
        return Difference(name, None, None, math.inf, math.inf)
    finite = torch.maximum(one.abs(), other.abs()).nan_to_num(0.0, 0.0, 0.0)
    return Difference(name, None, None, size, size / max(float(finite.max()), 1.0))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes: NaN is unequal to itself and 0.0 equals -0.0, so numbers do not show equal bits."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _finite(value: float | None) -> float | None:
    """Replace what is not finite by None, as metrics.jsonl does."""
    return None if value is None or not math.isfinite(value) else float(value)


def _shown(value: float | None) -> str:
    return "none" if value is None else repr(value)
