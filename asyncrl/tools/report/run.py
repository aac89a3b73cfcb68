"""What a run directory says, however the run ended. What is missing or broken becomes a sentence, never an error."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import UserError
from asyncrl.launch.processes import JOURNAL_FILE
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
"""A directory with one of them is a run's, however little is left of it."""
LARGEST = 1e100
"""Beyond it a number is as good as infinite; its square and sums of it are not."""
NOT_THERE, DAMAGED = "is not there", "is damaged"
Record = dict[str, Any]
Points = list[tuple[float, float | None]]
"""Step and value; None where it was written down as no number."""


@dataclass(frozen=True)
class Run:
    path: Path
    name: str
    steps: list[Record]
    evaluations: list[Record]
    status: Record
    failure: Failure | None
    config_text: str
    config: Record
    starts: list[Record]
    """One per process of the learner, oldest first."""
    spans: list[Record]
    """Lines of timeline.jsonl."""
    missing: list[str] = field(default_factory=list)
    """Sentences for the reader."""

    def points(self, key: str) -> Points:
        """Of the steps that have it."""
        return [(float(step["step"]), number(step[key])) for step in self.steps if key in step]

    def values(self, key: str) -> list[float]:
        """Those that are numbers."""
        return [value for _, value in self.points(key) if value is not None]

    def last(self, key: str) -> float | None:
        return next((value for _, value in reversed(self.points(key)) if value is not None), None)

    def setting(self, path: str) -> Any:
        """Of the configuration by its dotted key, or None."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @cached_property
    def keys(self) -> list[str]:
        """Of all steps, in the order in which they came up."""
        return list(dict.fromkeys(key for step in self.steps for key in step))

    @property
    def held_out(self) -> Points:
        return [(float(e["step"]), number(e.get("accuracy"))) for e in self.evaluations]

    @property
    def ending(self) -> str:
        """finished, failed, interrupted, or what it was about when it was heard last; empty if it never spoke."""
        return "failed" if self.failure else str(self.status.get("phase") or "")

    @property
    def trajectories(self) -> int:
        """Consumed by the recorded steps."""
        return round(sum(number(value) or 0.0 for s in self.steps for key, value in s.items() if key[:5] == "rows/"))

    @cached_property
    def clock(self) -> tuple[float, float] | None:
        """Unix seconds of the first thing that is known of the run and of the last."""
        times = [t for t in (_start(self.steps[0]), number(self.steps[-1].get("time"))) if t] if self.steps else []
        times += [t for start in self.starts if (t := number(start.get("time")))]
        times += [span[end] for span in self.spans for end in ("since", "until") if span["who"] == "learner"]
        return (min(times), max(times)) if times else None

    @cached_property
    def busy_s(self) -> float | None:
        """Wall-clock seconds of its processes, without the pauses between them. As for `asyncrl watch`, each worked
        from its start to its last step; one that made none did not."""
        if self.clock is None:
            return None
        times = [t for step in self.steps if (t := number(step.get("time")))]
        starts = sorted(t for start in self.starts if (t := number(start.get("time"))))
        paused = sum(began - max([earlier, *(t for t in times if t <= began)]) for earlier, began in pairwise(starts))
        return max(0.0, self.clock[1] - self.clock[0] - paused)


def read_run(path: Path) -> Run:
    """Raises UserError only where there is no run: no directory, or none of the files that a run begins with; and where
    none of them can be read."""
    _check_run(path)
    missing: list[str] = []
    steps = sorted(_lines(path / METRICS_FILE, missing), key=lambda step: step["step"])
    text, config = _configuration(path / CONFIG_FILE, missing)
    starts = read_starts(path)
    if not starts:
        why = why_nothing(path / ENVIRONMENT_FILE)
        missing.append(f"{ENVIRONMENT_FILE} {why}: what it ran on, and how often it was started, is not known.")
    failure = read_failure(path)
    if failure is None and (why := why_nothing(path / FAILURE_FILE)) != NOT_THERE:
        missing.append(f"{FAILURE_FILE} {why}: why the run stopped is not known.")
    if (why := why_nothing(path / SAMPLES_FILE)) not in (NOT_THERE, DAMAGED):
        missing.append(f"{SAMPLES_FILE} {why}: no sample is shown.")
    return Run(
        path=path,
        name=_name(path),
        steps=steps,
        evaluations=_lines(path / EVALUATIONS_FILE, missing),
        status=_status(path, missing),
        failure=failure,
        config_text=text,
        config=config,
        starts=starts,
        spans=_spans(path, missing),
        missing=missing,
    )


def _check_run(path: Path) -> None:
    meant = _another_run(path)
    signs = SIGNS[1:] if meant else SIGNS
    refused: UserError | None = None
    for name in signs:
        try:
            if is_there(path / name):
                return
        except UserError as problem:
            refused = refused or problem
    if refused:
        raise refused
    if not path.is_dir():
        raise UserError(f"there is no run directory {path}. Name the run_dir of a run")
    if meant:
        raise UserError(f"there is no run in {path}, but its {CONFIG_FILE} is of one: {meant}. Name that")
    raise UserError(f"there is no run in {path}: it has none of {', '.join(SIGNS)}. Name the run_dir of a run")


def _another_run(path: Path) -> str:
    """Where a run is made with the configuration in this folder, if that is not here; as of the demo's folder."""
    run_dir = _configuration(path / CONFIG_FILE, [])[1].get("run_dir")
    if isinstance(run_dir, str):
        for folder in (Path(run_dir), path / Path(run_dir).name):  # as named from here, or moved with this folder
            if any(os.path.exists(folder / name) for name in SIGNS) and not path.samefile(folder):
                return str(folder)
    return ""


def why_nothing(file: Path) -> str:
    """What is to be said of a file that nothing could be had from."""
    try:
        file.open("rb").close()
    except FileNotFoundError:
        return NOT_THERE
    except OSError as problem:
        return f"cannot be read ({problem.strerror})"
    return DAMAGED


def number(value: Any) -> float | None:
    """A number that can be reckoned with, or None for everything else that a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if abs(value) < LARGEST else None  # false for NaN


def read_lines(path: Path) -> tuple[list[Record], int]:
    """Records of a JSONL file, and how many lines were none. A last line that is not finished is left out."""
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


def _lines(path: Path, missing: list[str]) -> list[Record]:
    """Those with a step."""
    try:
        records, broken = read_lines(path)
    except OSError:
        missing.append(f"{path.name} {why_nothing(path)}: its part of this page is empty.")
        return []
    stepped = [record for record in records if number(record.get("step")) is not None]
    broken += len(records) - len(stepped)
    if broken:
        missing.append(f"{path.name} has {broken} lines that could not be read; they are left out.")
    return stepped


def _spans(path: Path, missing: list[str]) -> list[Record]:
    file = path / TIMELINE_FILE
    try:
        records, broken = read_lines(file)
    except OSError:
        missing.append(f"{TIMELINE_FILE} {why_nothing(file)}: of the rollout servers' time only totals are known.")
        return []
    spans = [record for record in records if _is_span(record)]
    if broken + len(records) - len(spans):
        missing.append(f"{TIMELINE_FILE} has {broken + len(records) - len(spans)} lines that could not be read.")
    return spans


def _is_span(record: Record) -> bool:
    since, until = number(record.get("since")), number(record.get("until"))
    named = isinstance(record.get("who"), str) and isinstance(record.get("what"), str)
    return named and since is not None and until is not None and since <= until


def _status(path: Path, missing: list[str]) -> Record:
    status = read_status(path)
    if not status:
        missing.append(f"{STATUS_FILE} {why_nothing(path / STATUS_FILE)}: how the run is, or ended, is not known.")
    return status


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


def _name(path: Path) -> str:
    """Short, but more than `grpo`."""
    parts = path.resolve().parts
    return "/".join(parts[-2:]) if len(parts) > 2 else path.name or str(path)


__all__ = ["SAMPLES_FILE", "Points", "Record", "Run", "number", "read_lines", "read_run", "why_nothing"]
