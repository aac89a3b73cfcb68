"""For how long something was beyond its limit: what an alert's `for` is to a live run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from asyncrl.tools.report.run import Record, Run, number

LEAST_STEPS = 3
LEAST_SHARE = 0.1
"""Of the steps: a short run has no time for an alert, and may be as ill."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps that met a condition."""

    first: int
    last: int
    seconds: float
    steps: int
    of: int
    """Steps that have what was asked for."""

    def __str__(self) -> str:
        if self.steps == self.of:
            return "in every step"
        return f"steps {self.first:,} to {self.last:,}" if self.first != self.last else f"step {self.first:,}"


def longest(run: Run, holds: Callable[[Record], bool | None]) -> Stretch | None:
    """`holds` says None of a step that does not have what it asks for: it neither counts nor ends a stretch."""
    answers = [(step, answer) for step in run.steps if (answer := holds(step)) is not None]
    stretches = [[step for step, _ in part] for answer, part in groupby(answers, key=lambda item: item[1]) if answer]
    return _stretch(max(stretches, key=len), len(answers)) if stretches else None


def long_enough(stretch: Stretch | None, hold_s: float) -> bool:
    """Whether the alert would have fired, or the run was ill for a good part of it."""
    if stretch is None:
        return False
    many = stretch.steps >= max(LEAST_STEPS, LEAST_SHARE * stretch.of)
    return many or (stretch.steps > 1 and stretch.seconds >= hold_s)


def _stretch(steps: list[Record], of: int) -> Stretch:
    first, last = steps[0], steps[-1]
    began, ended = number(first.get("time")), number(last.get("time"))
    seconds = ended - began if began is not None and ended is not None else 0.0
    return Stretch(int(first["step"]), int(last["step"]), seconds, len(steps), of)
