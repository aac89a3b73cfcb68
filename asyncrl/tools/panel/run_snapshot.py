"""What a run directory says so far, read as it grows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE, read_status
from asyncrl.tools.panel.pace import SAME_PROCESS_S, begun_at, seconds_per_step
from asyncrl.tools.panel.safe_records import sound_numbers, sound_sample, sound_status

STEPS_KEPT = 512
NEWEST_SAMPLES_BYTES = 2 << 20
"""Of a file that may be gigabytes: two samples are shown."""
ENDED = ("finished", "failed", "interrupted")


@dataclass
class Story:
    """`refresh` brings it up to date; every field is empty until the run has written something."""

    run_dir: Path
    since: float = 0.0
    """Unix time. An older status is an earlier process' and says nothing about this one."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The last of them."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Step and mean reward of all of them."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    good: dict[str, Any] = field(default_factory=dict)
    """The newest sample's prompt with its best completion, if that scored."""
    bad: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the launcher has to say: crashes and restarts."""

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
        steps = _sound(records)
        self.steps = (self.steps + steps)[-STEPS_KEPT:]
        for step in steps:
            self._count_time(step)
            if step.get("reward/mean") is not None:
                self.rewards.append((step["step"], step["reward/mean"]))
        records, restarted = self._evaluations.new_records()
        self.evaluations = ([] if restarted else self.evaluations) + _sound(records)
        for sample in self._samples.new_records()[0]:
            self._remember(sound_sample(sample))
        status = sound_status(read_status(self.run_dir))
        if status and status.get("time", self.since) >= self.since:
            self.status = status

    def _forget_processes(self) -> None:
        self._earlier_s = 0.0
        """Of learners before the latest one."""
        self._process: tuple[float, float] | None = None
        """Unix times of the latest one's beginning and of its newest step."""

    def _count_time(self, step: dict[str, Any]) -> None:
        begun = begun_at(step)
        if begun is None:
            return
        if self._process is not None and abs(begun - self._process[0]) >= SAME_PROCESS_S:
            self._earlier_s += self._process[1] - self._process[0]
            self._process = None
        self._process = (self._process[0] if self._process else begun, step["time"])

    def _remember(self, sample: dict[str, Any]) -> None:
        scored = sample["completions"]
        if not scored:
            return
        best, worst = max(scored, key=lambda c: c["reward"]), min(scored, key=lambda c: c["reward"])
        self.good = {**sample, "completion": best}
        if worst["reward"] < best["reward"] or not self.bad:
            self.bad = {**sample, "completion": worst}

    @property
    def latest(self) -> dict[str, Any]:
        return self.steps[-1] if self.steps else {}

    def last(self, key: str) -> Any:
        """The newest value that is there; slow numbers are not in every step."""
        return next((step[key] for step in reversed(self.steps[-50:]) if step.get(key) is not None), None)

    def mean(self, key: str, count: int) -> float | None:
        """Of the last `count` steps; None where not all of them have it."""
        values = [step[key] for step in self.steps[-count:] if step.get(key) is not None]
        return sum(values) / count if len(values) == count else None

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "starting"))

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED

    def seconds_taken(self) -> float | None:
        """While learners ran; None where that is not recorded."""
        if self._process is None:
            return None
        begun, newest = self._process
        end = max(newest, self.status.get("time", newest)) if self.has_ended else newest
        return self._earlier_s + end - begun

    def seconds_left(self) -> float | None:
        """At the pace of the steps so far; None where that is not known yet, or the run has ended."""
        total, pace = self.status.get("total_steps"), seconds_per_step(self.steps)
        if not total or pace is None or self.has_ended or self.latest.get("time") is None:
            return None
        of_this_step = min(max(0.0, time.time() - self.latest["time"]), pace)
        return max(0.0, (total - self.latest["step"]) * pace - of_this_step)


def _sound(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [numbers for record in records if (numbers := sound_numbers(record)) is not None]
