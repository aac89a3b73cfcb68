"""Read a run directory, however the run ended. What is missing or broken becomes a sentence, never an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
from asyncrl.telemetry.environment import ENVIRONMENT_FILE, read_starts
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

SIGNS = (CONFIG_FILE, STATUS_FILE, METRICS_FILE, JOURNAL_FILE, FAILURE_FILE)
"""Files that mark a directory as a run's, each of them alone."""
LARGEST = 1e100
"""Numbers from here on count as infinite: squares and sums of smaller ones are finite."""
NOT_THERE, DAMAGED = "is not there", "is damaged"
Record = dict[str, Any]
Points = list[tuple[float, float | None]]
"""Steps and values; None where the file holds no number."""


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run directory's files."""

    path: Path
    name: str
    steps: list[Record]
    evaluations: list[Record]
    status: Record
    failure: Failure | None
    config_text: str
    config: Record
    starts: list[Record]
    """Records of the starts of the learner's processes, oldest first."""
    spans: list[Record]
    """Lines of timeline.jsonl."""
    missing: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""

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
    def clock(self) -> tuple[float, float] | None:
        """Unix seconds of the earliest and of the latest record."""
        times = [t for t in (_start(self.steps[0]), number(self.steps[-1].get("time"))) if t] if self.steps else []
        times += [t for start in self.starts if (t := number(start.get("time")))]
        times += [span[end] for span in self.spans for end in ("since", "until") if span["who"] == "learner"]
        return (min(times), max(times)) if times else None

    @cached_property
    def busy_s(self) -> float | None:
        """Seconds of the learner's processes, each from its start to its last step, as `asyncrl watch` counts them."""
        if self.clock is None:
            return None
        times = [t for step in self.steps if (t := number(step.get("time")))]
        starts = sorted(t for start in self.starts if (t := number(start.get("time"))))
        paused = sum(began - max([earlier, *(t for t in times if t <= began)]) for earlier, began in pairwise(starts))
        return max(0.0, self.clock[1] - self.clock[0] - paused)


def read_run(path: Path) -> RecordedRun:
    """Read a run. Raises UserError only where there is none, or none of the files that mark one can be read."""
    _check_run(path)
    missing: list[str] = []
    lost = "its part of this page is empty"
    steps = sorted(_records(path / METRICS_FILE, missing, _has_step, lost), key=lambda step: step["step"])
    text, config = _configuration(path / CONFIG_FILE, missing)
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
        name="/".join(path.resolve().parts[-2:]),
        steps=steps,
        evaluations=_records(path / EVALUATIONS_FILE, missing, _has_step, lost),
        status=status,
        failure=failure,
        config_text=text,
        config=config,
        starts=starts,
        spans=_records(path / TIMELINE_FILE, missing, _is_span, "of the rollout servers' time only totals are known"),
        missing=missing,
    )


def _check_run(path: Path) -> None:
    other_run = _another_run(path)
    refused: UserError | None = None
    for name in SIGNS[1:] if other_run else SIGNS:
        try:
            if is_there(path / name):
                return
        except UserError as problem:
            refused = refused or problem
    if refused:
        raise refused
    if not path.is_dir():
        raise UserError(f"there is no run directory {path}. Name the run_dir of a run")
    if other_run:
        raise UserError(f"there is no run in {path}, but its {CONFIG_FILE} is of one: {other_run}. Name that")
    raise UserError(f"there is no run in {path}: it has none of {', '.join(SIGNS)}. Name the run_dir of a run")


def _another_run(path: Path) -> str:
    """Return the run directory that this folder's config.yaml names, if it is another one; as in the demo's folder."""
    run_dir = _configuration(path / CONFIG_FILE, [])[1].get("run_dir")
    for folder in (Path(run_dir), path / Path(run_dir).name) if isinstance(run_dir, str) else ():  # moved, or not
        if any(os.path.exists(folder / name) for name in SIGNS) and not path.samefile(folder):
            return str(folder)
    return ""


def why_nothing(file: Path) -> str:
    """Say why a file gave no record."""
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


def read_lines(path: Path) -> tuple[list[Record], int]:
    """Read a JSONL file; returns its records and the number of broken lines. An unfinished last line does not count."""
    records, broken = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            broken += line.endswith(b"\n")
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            broken += 1
    return records, broken


def _records(path: Path, missing: list[str], is_usable: Callable[[Record], bool], lost: str) -> list[Record]:
    """Read the usable records of a file; `lost` says what the page lacks without it."""
    try:
        records, broken = read_lines(path)
    except OSError:
        missing.append(f"{path.name} {why_nothing(path)}: {lost}.")
        return []
    usable = [record for record in records if is_usable(record)]
    if broken := broken + len(records) - len(usable):
        missing.append(f"{path.name} has {broken} lines that could not be read; they are left out.")
    return usable


def _has_step(record: Record) -> bool:
    return number(record.get("step")) is not None


def _is_span(record: Record) -> bool:
    since, until = number(record.get("since")), number(record.get("until"))
    named = isinstance(record.get("who"), str) and isinstance(record.get("what"), str)
    return named and since is not None and until is not None and since <= until


def _configuration(path: Path, missing: list[str]) -> tuple[str, Record]:
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


def _start(step: Record) -> float | None:
    ended = number(step.get("time"))
    return None if ended is None else ended - (number(step.get("step_s")) or 0.0)
