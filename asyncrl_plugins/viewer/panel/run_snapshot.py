"""A run directory's records so far, read as it grows. Lines that a crash has left half-written are left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl.launch.display import RunProgress
from asyncrl.telemetry.host_versions import read_starts
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import CONFIG_FILE, SAMPLES_FILE
from asyncrl_plugins.viewer.recorded_run.findings import warnings
from asyncrl_plugins.viewer.recorded_run.run import (
    SAME_PROCESS_S,
    Points,
    Record,
    RecordedRun,
    busy_seconds,
    number,
    process_clock,
    read_configuration,
    recorded_method_line,
)

JUDGED_STEPS = 10
"""Newest steps in which something has to be wrong for a warning."""
LOG_BYTES = 8192
"""Bytes at the end of a log that have its newest line."""
NEWEST_SAMPLES_BYTES = 2 << 20
"""Bytes that are read of a file that may have gigabytes: two samples are shown."""
RECENT_STEPS, FEWEST_STEPS = 128, 3
"""Steps that tell the pace."""


@dataclass
class RunSnapshot(RunProgress):
    """Progress with samples, configuration and warnings."""

    rewards: Points = field(default_factory=list)
    """Step and mean reward of all steps."""
    clocks: list[tuple[float, float]] = field(default_factory=list)
    """Unix time of all steps, and of the beginning of their process."""
    good: dict[str, Any] = field(default_factory=dict)
    """The newest sample's prompt with its best completion, if that scored."""
    bad: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Crashes and restarts that the launcher reports."""
    config: Record = field(default_factory=dict)
    """Content of config.yaml; empty before the learner has written it."""
    method: str = ""
    """The method in one line; empty where it is not known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._samples = JsonlTail(self.run_dir / SAMPLES_FILE, newest_bytes=NEWEST_SAMPLES_BYTES)
        self._config_written_ns = 0

    def refresh(self) -> None:
        self._read_config()
        super().refresh()
        for sample in self._samples.new_records()[0]:
            self._keep_sample(sample)

    def add_steps(self, records: list[Record], *, restarted: bool) -> None:
        super().add_steps(records, restarted=restarted)
        if restarted:
            self.rewards, self.clocks = [], []
        self.rewards += [(step["step"], number(step["reward/mean"])) for step in records if "reward/mean" in step]
        self.clocks += [clock for step in records if (clock := process_clock(step))]

    def _read_config(self) -> None:
        """Read config.yaml where it is new: a resumed learner may write another one."""
        file = self.run_dir / CONFIG_FILE
        try:
            written_ns = file.stat().st_mtime_ns
        except OSError:  # not yet
            return
        if written_ns != self._config_written_ns:
            self._config_written_ns = written_ns
            self.config = read_configuration(file, [])[1]
            self.method = recorded_method_line(self.config.get("algorithm"))

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
    def untrained_because(self) -> str:
        """Reason why the newest step has not moved the policy, where that is planned; empty elsewhere."""
        if "critic/loss" not in self.latest or "grad_norm" in self.latest:
            return ""
        critic = self.config.get("critic")
        steps = critic.get("warmup_steps") if isinstance(critic, dict) else None
        return f"not before step {steps + 1}: the critic warms up" if isinstance(steps, int) else "the critic warms up"

    @property
    def groups_per_step(self) -> float:
        batch = self.config.get("batch")
        return number(batch.get("prompts_per_step")) or 0.0 if isinstance(batch, dict) else 0.0

    def warnings(self) -> dict[str, str]:
        """Active problems of the newest steps, by subject; none for a run that has ended."""
        starts = [{"time": self.since}, *read_starts(self.run_dir)[-1:]]
        newest = self.own_steps[-JUDGED_STEPS:]
        evaluations, rewards = (self.evaluations, self.rewards) if newest else ([], [])
        found = warnings(RecordedRun(self.run_dir, newest, evaluations, self.status, rewards, starts))
        return super().warnings() | found

    @property
    def is_starting(self) -> bool:
        """Whether there is no step to tell of, and there may be one."""
        return not self.steps and not self.has_ended

    @property
    def last_words(self) -> dict[str, str]:
        """The newest line of each service's log, without time and module; empty where there is none."""
        found: dict[str, str] = {}
        for log in sorted((self.run_dir / "logs").glob("*.log")):
            with suppress(OSError):
                lines = log.read_bytes()[-LOG_BYTES:].decode(errors="replace").splitlines()
                found[log.stem] = next(
                    (line.partition(": ")[2] or line for line in reversed(lines) if line.strip()), ""
                )
        return found

    def seconds_taken(self) -> float | None:
        """Return the seconds in which learners ran; None where that is not recorded."""
        return busy_seconds(self.clocks, self.status)

    def seconds_left(self) -> float | None:
        """Seconds to the end at the pace of the steps so far; None where that is unknown, or the run has ended."""
        total, pace = self.status.get("total_steps"), seconds_per_step(self.steps)
        if not total or pace is None or self.has_ended or self.latest.get("time") is None:
            return None
        of_this_step = min(max(0.0, time.time() - self.latest["time"]), pace)
        return max(0.0, (total - self.latest["step"]) * pace - of_this_step)


def seconds_per_step(steps: Sequence[Record]) -> float | None:
    """Return the mean time from step to step of the newest process, its evaluations and checkpoints included.

    None before there are a few steps. A step made again from the journal waits for nothing and publishes nothing.
    """
    clocks = [clock for step in steps if step.get("publish_bytes") != 0 and (clock := process_clock(step))]
    times = [at for at, began in clocks if abs(began - clocks[-1][1]) < SAME_PROCESS_S][-RECENT_STEPS:]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > FEWEST_STEPS else None
