"""A run directory's records so far, read as it grows. Lines that a crash has left half-written are left out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE, read_status

STEPS_KEPT = 512
NEWEST_SAMPLES_BYTES = 2 << 20
"""Bytes that are read of a file that may have gigabytes: two samples are shown."""
ENDED = ("finished", "failed", "interrupted")
RECENT_STEPS = 30
FEWEST_STEPS = 3
PAUSE = 3.0
"""An interval this many times as long as usual holds an evaluation, a checkpoint or a wait."""
SAME_PROCESS_S = 2.0

Step = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass
class RunSnapshot:
    """`refresh` brings it up to date; every field is empty until the run has written something."""

    run_dir: Path
    since: float = 0.0
    """Unix time. A status before it was written by an earlier process, and is ignored."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The newest STEPS_KEPT steps."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Step and mean reward of all steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    good: dict[str, Any] = field(default_factory=dict)
    """The newest sample's prompt with its best completion, if that scored."""
    bad: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Crashes and restarts that the launcher reports."""

    def __post_init__(self) -> None:
        self._steps = JsonlTail(self.run_dir / METRICS_FILE)
        self._evaluations = JsonlTail(self.run_dir / EVALUATIONS_FILE)
        self._samples = JsonlTail(self.run_dir / SAMPLES_FILE, newest_bytes=NEWEST_SAMPLES_BYTES)
        self._forget_processes()

    def refresh(self) -> None:
        records, restarted = self._steps.new_records()
        if restarted:
            self.steps, self.rewards = [], []
            self._forget_processes()
        self.steps = (self.steps + records)[-STEPS_KEPT:]
        for step in records:
            self._count_time(step)
            if step.get("reward/mean") is not None:
                self.rewards.append((step["step"], step["reward/mean"]))
        records, restarted = self._evaluations.new_records()
        self.evaluations = ([] if restarted else self.evaluations) + records
        for sample in self._samples.new_records()[0]:
            self._keep_sample(sample)
        status = read_status(self.run_dir)
        if status and status.get("time", self.since) >= self.since:
            self.status = status

    def _forget_processes(self) -> None:
        self._seconds = 0.0
        """Seconds in which learners ran, up to the newest step."""
        self._timed_step: Step = {}
        """The newest step with a time."""

    def _count_time(self, step: Step) -> None:
        begun, last_begun = _begun_at(step), _begun_at(self._timed_step)
        if begun is None:
            return
        is_same_process = last_begun is not None and abs(begun - last_begun) < SAME_PROCESS_S
        self._seconds += step["time"] - self._timed_step["time"] if is_same_process else step["uptime_s"]
        self._timed_step = step

    def _keep_sample(self, record: dict[str, Any]) -> None:
        scored = [one for one in record.get("completions", ()) if one.get("reward") is not None]
        if not scored:
            return
        sample = {key: record[key] for key in ("step", "prompt", "answer") if key in record}
        best, worst = max(scored, key=lambda c: c["reward"]), min(scored, key=lambda c: c["reward"])
        self.good = {**sample, "completion": best}
        if worst["reward"] < best["reward"] or not self.bad:
            self.bad = {**sample, "completion": worst}

    @property
    def latest(self) -> dict[str, Any]:
        return self.steps[-1] if self.steps else {}

    def last(self, key: str) -> Any:
        """The newest value of a metric; slow metrics are not in every step."""
        return next((step[key] for step in reversed(self.steps[-50:]) if step.get(key) is not None), None)

    def mean(self, key: str, count: int) -> float | None:
        """Mean of a metric over the last `count` steps; None where not all of them have it."""
        values = [step[key] for step in self.steps[-count:] if step.get(key) is not None]
        return sum(values) / count if len(values) == count else None

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "starting"))

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED

    def seconds_taken(self) -> float | None:
        """Seconds in which learners ran; None where that is not recorded."""
        if not self._timed_step:
            return None
        newest = self._timed_step["time"]
        after = max(0.0, self.status.get("time", newest) - newest) if self.has_ended else 0.0
        return self._seconds + after

    def seconds_left(self) -> float | None:
        """Seconds to the end at the pace of the steps so far; None where that is unknown, or the run has ended."""
        total, pace = self.status.get("total_steps"), seconds_per_step(self.steps)
        if not total or pace is None or self.has_ended or self.latest.get("time") is None:
            return None
        of_this_step = min(max(0.0, time.time() - self.latest["time"]), pace)
        return max(0.0, (total - self.latest["step"]) * pace - of_this_step)


def seconds_per_step(steps: Sequence[Step]) -> float | None:
    """Seconds of a recent step and its share of all pauses so far. None before there are a few steps.

    Counted from one step to the next in the same process: time in which nothing ran does not count.
    """
    intervals = [after["uptime_s"] - before["uptime_s"] for before, after in pairwise(steps) if _follows(before, after)]
    if len(intervals) < FEWEST_STEPS:
        return None
    usual = median(intervals)
    pauses = sum(interval - usual for interval in intervals if interval > PAUSE * usual)
    return median(intervals[-RECENT_STEPS:]) + pauses / len(intervals)


def _follows(before: Step, after: Step) -> bool:
    """True for steps of one process. A step made again from the journal waits for nothing and publishes nothing."""
    if after.get("publish_bytes") == 0 or after.get("step") != before.get("step", 0) + 1:
        return False
    begun = [_begun_at(step) for step in (before, after)]
    return None not in begun and abs(begun[1] - begun[0]) < SAME_PROCESS_S


def _begun_at(step: Step) -> Any:
    """Unix time at which the process of this step began."""
    is_timed = step.get("time") is not None and step.get("uptime_s") is not None
    return step["time"] - step["uptime_s"] if is_timed else None
