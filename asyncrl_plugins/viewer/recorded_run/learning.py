"""The answer to the first question about a run: did it learn? Start against end, with standard errors.

Held-out accuracy and reward are compared between the first evaluation and the last that are scored alike, reward in
training between the first and the last tenth of the steps since rows or rewards changed. A difference of less than
STANDARD_ERRORS standard errors is noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from asyncrl.launch.display import scored_alike
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import STANDARD_ERRORS
from asyncrl_plugins.viewer.recorded_run.run import Record, RecordedRun, number

LEAST_STEPS = 3
"""Steps at each end whose spread tells a standard error."""
HELD_OUT, TRAINING = "held-out accuracy", "reward in training"
Direction = Literal["rose", "fell", "is within noise"]


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float
    """Standard error; 0 where every row scored the same."""

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Course:
    """Scores at the start and at the end of a run."""

    name: str
    start: Estimate
    end: Estimate
    where: str

    @property
    def direction(self) -> Direction:
        difference = self.end.value - self.start.value
        if abs(difference) <= STANDARD_ERRORS * sqrt(self.start.error**2 + self.end.error**2):
            return "is within noise"
        return "rose" if difference > 0 else "fell"

    @property
    def ends(self) -> str:
        return f"{self.start.value:.3f} → {self.end.value:.3f}"

    def __str__(self) -> str:
        figures = f"{self.start} to {self.end} ({self.where})"
        return f"{self.name} {self.direction}{': ' if self.direction == 'is within noise' else ' from '}{figures}"


def courses(run: RecordedRun) -> list[Course]:
    """Return what is known: held-out accuracy and reward, then reward in training."""
    return [*_held_out(run), *_in_training(run)]


def _held_out(run: RecordedRun) -> Iterator[Course]:
    for key, name in (("accuracy", HELD_OUT), ("reward", "held-out reward")):
        scored = [(e, estimate) for e in scored_alike(run.evaluations) if (estimate := _estimate(e, key)) is not None]
        if len(scored) > 1:
            (first, start), (last, end) = scored[0], scored[-1]
            yield Course(name, start, end, f"steps {first['step']:.0f} and {last['step']:.0f}")


def _estimate(evaluation: Record, key: str) -> Estimate | None:
    """Return a score with its recorded error; of a share without one, with that of its number of rows."""
    value, error = number(evaluation.get(key)), number(evaluation.get(f"{key}_error"))
    if value is None:
        return None
    rows = (number(evaluation.get("rows")) or 0.0) - (number(evaluation.get("errors")) or 0.0)
    if error is None and key == "accuracy" and rows >= 1:
        error = sqrt(max(0.0, value * (1 - value)) / rows)
    return None if error is None else Estimate(value, error)


def _in_training(run: RecordedRun) -> Iterator[Course]:
    since = max(run.changed_at, default=0.0)
    rewards = [value for step, value in run.rewards if value is not None and step >= since]
    window = max(LEAST_STEPS, len(rewards) // 10)
    if len(rewards) >= 2 * window:
        after = f" since step {since:.0f}" if since else ""
        where = f"the first and the last {window} steps{after}"
        yield Course(TRAINING, _mean(rewards[:window]), _mean(rewards[-window:]), where)


def _mean(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), stdev(values) / sqrt(len(values)))
