"""How long a run takes yet, from the steps that it has made, in this process or in one before a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

RECENT_STEPS = 30
FEWEST_STEPS = 3
PAUSE = 3.0
"""An interval this many times as long as usual holds an evaluation, a checkpoint or a wait."""
SAME_PROCESS_S = 2.0

Step = Mapping[str, Any]
"""A line of metrics.jsonl."""


def seconds_per_step(steps: Sequence[Step]) -> float | None:
    """A step as they are now, and its share of the pauses so far. None before there are a few.

    From one step to the next in the same process: time in which nothing ran does not count.
    """
    intervals = [after["uptime_s"] - before["uptime_s"] for before, after in pairwise(steps) if _follows(before, after)]
    if len(intervals) < FEWEST_STEPS:
        return None
    usual = median(intervals)
    pauses = sum(interval - usual for interval in intervals if interval > PAUSE * usual)
    return median(intervals[-RECENT_STEPS:]) + pauses / len(intervals)


def _follows(before: Step, after: Step) -> bool:
    """In one process, and not made again from the journal, which waits for nobody and publishes nothing."""
    if after.get("publish_bytes") == 0 or after.get("step") != before.get("step", 0) + 1:
        return False
    begun = [begun_at(step) for step in (before, after)]
    return None not in begun and abs(begun[1] - begun[0]) < SAME_PROCESS_S


def begun_at(step: Step) -> Any:
    """Unix time at which the process of this step began."""
    there = step.get("time") is not None and step.get("uptime_s") is not None
    return step["time"] - step["uptime_s"] if there else None
