"""A run directory's steps, evaluations and status, read as they grow."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import EVALUATIONS_FILE, METRICS_FILE, read_status

STEPS_KEPT = 512
ENDED = ("finished", "failed", "interrupted")
"""Phases of a run that has ended."""
STARTING = "the learner to start (logs/learner.log says how far it is)"


@dataclass
class RunProgress:
    """`refresh` brings it up to date; every field is empty until the run has written something."""

    run_dir: Path
    since: float = 0.0
    """Unix time. A status before it was written by an earlier process, and is ignored."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The newest STEPS_KEPT steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = JsonlTail(self.run_dir / METRICS_FILE)
        self._evaluations = JsonlTail(self.run_dir / EVALUATIONS_FILE)

    def refresh(self) -> None:
        records, restarted = self._steps.new_records()
        self.add_steps([record for record in records if has_step(record)], restarted=restarted)
        records, restarted = self._evaluations.new_records()
        self.evaluations = ([] if restarted else self.evaluations) + [record for record in records if has_step(record)]
        status = read_status(self.run_dir)
        if status and status.get("time", self.since) >= self.since:
            self.status = status

    def add_steps(self, records: list[dict[str, Any]], *, restarted: bool) -> None:
        """Take new steps. `restarted`: the file was cut back, and these are all of it."""
        self.steps = (([] if restarted else self.steps) + records)[-STEPS_KEPT:]

    @property
    def latest(self) -> dict[str, Any]:
        return self.steps[-1] if self.steps else {}

    def last(self, key: str) -> Any:
        """The newest value of a metric; slow metrics are not in every step."""
        return next((step[key] for step in reversed(self.steps[-50:]) if step.get(key) is not None), None)

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "starting"))

    @property
    def waiting_for(self) -> str:
        """Current wait of the learner; empty for none. Before its first status it reads and measures rows."""
        return str(self.status.get("waiting_for") or "") if self.status else STARTING

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED


def has_step(record: dict[str, Any]) -> bool:
    step = record.get("step")
    return isinstance(step, int | float) and not isinstance(step, bool) and isfinite(step)
