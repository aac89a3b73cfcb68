"""Read a run directory, however the run ended. What is missing or broken becomes a sentence, never an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.run_folder.failure import FAILURE_FILE, Failure, read_failure
from asyncrl.telemetry.host_versions import ENVIRONMENT_FILE, read_starts
from asyncrl.telemetry.jsonl import read_records
from asyncrl.telemetry.reading import is_there
from asyncrl.telemetry.recorder import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    STATUS_FILE,
    TIMELINE_FILE,
    read_status,
)

SIGNS = (STATUS_FILE, METRICS_FILE, JOURNAL_FILE, FAILURE_FILE)
"""Files that mark a directory as a run's, each of them alone."""
SAME_PROCESS_S = 2.0
"""Largest difference between the beginnings that two steps of one process tell."""
LARGEST = 1e100
"""Numbers from here on count as infinite: squares and sums of smaller ones are finite."""
ENDED = ("finished", "failed", "interrupted")
"""Phases of a run that has ended."""
NOT_THERE, DAMAGED = "is not there", "is damaged"
Record = dict[str, Any]
Points = list[tuple[float, float | None]]
"""Steps and values; None where the file holds no number."""


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run directory's files, or of as much of them as is known."""

    path: Path
    steps: list[Record]
    evaluations: list[Record]
    status: Record
    rewards: Points
    """Mean reward of every step of the run."""
    starts: list[Record]
    """Records of the starts of the learner's processes, oldest first."""
    failure: Failure | None = None
    config_text: str = ""
    config: Record = field(default_factory=dict)
    spans: list[Record] = field(default_factory=list)
    """Lines of timeline.jsonl."""
    missing: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    @property
    def name(self) -> str:
        return "/".join(self.path.resolve().parts[-2:])

    def points(self, key: str) -> Points:
        """Return the steps that have `key`, with its values."""
        return [(float(step["step"]), number(step[key])) for step in self.steps if key in step]

    def values(self, key: str) -> list[float]:
        """Return the values that are numbers."""
        return [value for _, value in self.points(key) if value is not None]

    def mean(self, key: str) -> float | None:
        return fmean(values) if (values := self.values(key)) else None

    def last(self, key: str) -> float | None:
        return values[-1] if (values := self.values(key)) else None

    def setting(self, path: str) -> Any:
        """Return a value of the configuration by its dotted key, or None."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def quantization(self) -> str:
        """rollout.quantization; empty where the policy sampled with the learner's own weights."""
        return "" if (value := self.setting("rollout.quantization")) in (None, "none") else str(value)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all steps, in the order of their first appearance."""
        return list(dict.fromkeys(key for step in self.steps for key in step))

    @property
    def held_out(self) -> Points:
        return [(float(e["step"]), number(e.get("accuracy"))) for e in self.evaluations]

    @property
    def ending(self) -> str:
        """The last phase in status.json, such as finished, failed, interrupted; empty if there is none."""
        return "failed" if self.failure else str(self.status.get("phase") or "")

    @property
    def trajectories(self) -> int:
        """The number of trajectories that the recorded steps consumed."""
        return round(sum(number(value) or 0.0 for s in self.steps for key, value in s.items() if key[:5] == "rows/"))

    @cached_property
    def began(self) -> float | None:
        """Unix seconds of the earliest start or step."""
        times = [t for start in self.starts if (t := number(start.get("time")))]
        times += [t - (number(step.get("step_s")) or 0.0) for step in self.steps[:1] if (t := number(step.get("time")))]
        return min(times, default=None)

    @cached_property
    def busy_s(self) -> float | None:
        return busy_seconds([clock for step in self.steps if (clock := process_clock(step))], self.status)


def process_clock(step: Record) -> tuple[float, float] | None:
    """Return Unix seconds of a step, and of the beginning of its process."""
    at, uptime = number(step.get("time")), number(step.get("uptime_s"))
    return None if at is None or uptime is None else (at, at - uptime)


def busy_seconds(clocks: Sequence[tuple[float, float]], status: Record) -> float | None:
    """Sum the seconds in which learners ran: each from its beginning to its last step, the last one to its end."""
    if not clocks:
        return None
    ends = [clock for clock, after in pairwise(clocks) if abs(after[1] - clock[1]) >= SAME_PROCESS_S]
    after_s = (number(status.get("time")) or 0.0) - clocks[-1][0] if status.get("phase") in ENDED else 0.0
    return sum(at - began for at, began in (*ends, clocks[-1])) + max(0.0, after_s)


def read_run(path: Path) -> RecordedRun:
    """Read a run. Raises UserError only where there is none, or none of the files that mark one can be read."""
    _check_run(path)
    missing: list[str] = []
    lost = "its part of this page is empty"
    steps = sorted(_records(path / METRICS_FILE, missing, has_step, lost), key=lambda step: step["step"])
    text, config = read_configuration(path / CONFIG_FILE, missing)
    starts, failure, status = read_starts(path), read_failure(path), read_status(path)
    for file, content, expected, lost_with_it in (
        (ENVIRONMENT_FILE, starts, (), "what it ran on, and how often it was started, is not known"),
        (FAILURE_FILE, failure, (NOT_THERE,), "why the run stopped is not known"),
        (STATUS_FILE, status, (), "how the run is, or ended, is not known"),
        (SAMPLES_FILE, None, (NOT_THERE, DAMAGED), "no sample is shown"),
    ):
        if not content and (why := why_nothing(path / file)) not in expected:
            missing.append(f"{file} {why}: {lost_with_it}.")
    return RecordedRun(
        path=path,
        steps=steps,
        rewards=[(float(step["step"]), number(step["reward/mean"])) for step in steps if "reward/mean" in step],
        evaluations=_records(path / EVALUATIONS_FILE, missing, has_step, lost),
        status=status,
        failure=failure,
        config_text=text,
        config=config,
        starts=starts,
        spans=_records(path / TIMELINE_FILE, missing, _is_span, "of the rollout servers' time only totals are known"),
        missing=missing,
    )


def _check_run(path: Path) -> None:
    refused = UserError(f"there is no run in {path}: it has none of {', '.join(SIGNS)}. Name the run_dir of a run")
    for name in reversed(SIGNS):
        try:
            if is_there(path / name):
                return
        except UserError as problem:
            refused = problem
    raise refused


def why_nothing(file: Path) -> str:
    """Explain why a file has no records."""
    try:
        file.open("rb").close()
    except FileNotFoundError:
        return NOT_THERE
    except OSError as problem:
        return f"cannot be read ({problem.strerror})"
    return DAMAGED


def number(value: Any) -> float | None:
    """Return a finite number, or None for everything else that a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if abs(value) < LARGEST else None  # false for NaN


def _records(path: Path, missing: list[str], is_usable: Callable[[Record], bool], lost: str) -> list[Record]:
    """Read the usable records of a file; `lost` says what the page lacks without it."""
    try:
        with path.open("rb") as file:
            records = list(read_records(file))
    except OSError:
        missing.append(f"{path.name} {why_nothing(path)}: {lost}.")
        return []
    usable = [record for record in records if record is not None and is_usable(record)]
    if broken := len(records) - len(usable):
        missing.append(f"{path.name} has {broken} lines that could not be read; they are left out.")
    return usable


def has_step(record: Record) -> bool:
    return number(record.get("step")) is not None


def _is_span(record: Record) -> bool:
    since, until = number(record.get("since")), number(record.get("until"))
    named = isinstance(record.get("who"), str) and isinstance(record.get("what"), str)
    return named and since is not None and until is not None and since <= until


def read_configuration(path: Path, missing: list[str]) -> tuple[str, Record]:
    """Return the file's text and its mapping, both empty where it cannot be read: `missing` gets the reason."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        missing.append(f"{path.name} {why_nothing(path)}: the run's settings are not known.")
        return "", {}
    try:
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        missing.append(f"{path.name} is no YAML: {str(problem).splitlines()[0]}")
        return text, {}
    return text, parsed if isinstance(parsed, dict) else {}
