"""What a run directory says so far, read as it grows."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE, STATUS_FILE


@dataclass
class Story:
    """`refresh` brings it up to date; every field is empty until the run has written something."""

    run_dir: Path
    since: float = 0.0
    """Unix time. An older status is an earlier process' and says nothing about this one."""
    steps: list[dict[str, Any]] = field(default_factory=list)
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
        self._samples = JsonlTail(self.run_dir / SAMPLES_FILE)

    def refresh(self) -> None:
        self.steps = _extended(self.steps, self._steps)
        self.evaluations = _extended(self.evaluations, self._evaluations)
        for sample in self._samples.new_records()[0]:
            self._remember(sample)
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            status = json.loads((self.run_dir / STATUS_FILE).read_text())
            if isinstance(status, dict) and status.get("time", self.since) >= self.since:
                self.status = status

    def _remember(self, sample: dict[str, Any]) -> None:
        scored = [c for c in sample.get("completions", []) if c.get("reward") is not None]
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

    def seconds_left(self) -> float | None:
        """From the median pace of the last steps of this process."""
        total, recent = self.status.get("total_steps"), self.steps[-30:]
        if not total or len(recent) < 3:
            return None
        paces = sorted(step["step_s"] for step in recent if step.get("step_s") is not None)
        return (total - self.latest.get("step", 0)) * paces[len(paces) // 2] if paces else None


def _extended(records: list[dict[str, Any]], tail: JsonlTail) -> list[dict[str, Any]]:
    """With what was appended; from the start again where a resumed run has cut the file back."""
    new, restarted = tail.new_records()
    return new if restarted else records + new
