"""Which of the recorded samples to show: good, bad, truncated and failed ones, from the whole course of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.tools.report.run import Record, number

PERIODS = 6
"""The run is divided into so many; of each the best and the worst group is shown."""
PER_STATUS = 3
STATUSES = ("truncated", "timed_out", "error")


@dataclass
class Choice:
    sample: Record
    labels: list[str] = field(default_factory=list)
    """Why it is shown: good, bad, truncated, timed_out, error."""


@dataclass(frozen=True)
class Chosen:
    choices: list[Choice]
    """The best and the worst of each period, then by status."""
    recorded: int
    """Samples in the file."""
    broken: int


def choose(file: Path, first: int, last: int) -> Chosen:
    """Reads the file once, and keeps no more than what may be shown. Raises OSError."""
    best: dict[int, tuple[float, Record]] = {}
    worst: dict[int, tuple[float, Record]] = {}
    by_status: dict[str, dict[int, Record]] = {status: {} for status in STATUSES}
    recorded = broken = 0
    for sample in _samples(file):
        if sample is None:
            broken += 1
            continue
        recorded += 1
        completions, period = completions_of(sample), _period(sample["step"], first, last)
        rewards = [reward for c in completions if (reward := number(c.get("reward"))) is not None]
        if rewards:
            mean = sum(rewards) / len(rewards)
            if period not in best or mean >= best[period][0]:
                best[period] = (mean, sample)
            if period not in worst or mean <= worst[period][0]:
                worst[period] = (mean, sample)
        for status in {str(c.get("status")) for c in completions} & by_status.keys():
            by_status[status].setdefault(period, sample)
    chosen: dict[int, Choice] = {}
    found: list[tuple[Record, str]] = []
    for period in sorted(best):
        found.append((best[period][1], "good"))
        if worst[period][0] < best[period][0]:
            found.append((worst[period][1], "bad"))
    failed = [(sample, status) for status in STATUSES for sample in _spread(list(by_status[status].values()))]
    for sample, label in [*found, *failed]:
        chosen.setdefault(id(sample), Choice(sample)).labels.append(label)
    return Chosen(list(chosen.values()), recorded, broken)


def completions_of(sample: Record) -> list[dict[str, Any]]:
    completions = sample.get("completions")
    return [c for c in completions if isinstance(c, dict)] if isinstance(completions, list) else []


def _samples(file: Path) -> Iterator[Record | None]:
    """None for a line that is no sample. A last line that is not finished is left out."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                sample = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n"):
                    yield None
                continue
            yield sample if isinstance(sample, dict) and number(sample.get("step")) is not None else None


def _period(step: float, first: int, last: int) -> int:
    return min(PERIODS - 1, max(0, int((step - first) * PERIODS / (last - first + 1))))


def _spread(samples: list[Record]) -> list[Record]:
    """The first, the last, and what lies between them."""
    places = {i * (len(samples) - 1) // (PER_STATUS - 1) for i in range(PER_STATUS)}
    return [samples[i] for i in sorted(places)] if samples else []
