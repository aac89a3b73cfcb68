"""Records of a run directory, as the panel, the report and the checks of a run's health take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.explain import method_line
from asyncrl.launch.display import ENDED
from asyncrl.run_folder.failure import Failure

SAME_PROCESS_S = 2.0
"""Largest difference between the beginnings that two steps of one process tell."""
LARGEST = 1e100
"""Numbers from here on count as infinite: squares and sums of smaller ones are finite."""
NOT_THERE, DAMAGED = "is not there", "is damaged"
Record = dict[str, Any]
Points = list[tuple[float, float | None]]
"""Steps and values; None where the file holds no number."""


def recorded_method_line(section: Any) -> str:
    """Method line of a run's config.yaml; empty where this version refuses its `algorithm` section."""
    try:
        return method_line(AlgorithmConfig.model_validate(section)) if isinstance(section, dict) else ""
    except ValueError:  # pydantic's errors, too
        return ""


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
        return str(self.setting("rollout.quantization") or "")

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all steps, in the order of their first appearance."""
        return list(dict.fromkeys(key for step in self.steps for key in step))

    @property
    def held_out(self) -> Points:
        return [(float(e["step"]), number(e.get("accuracy"))) for e in self.evaluations]

    @property
    def held_out_by_label(self) -> dict[str, Points]:
        """Accuracies of each value of evaluation.by, the lowest of the last evaluation first."""
        prefix, found = "accuracy/", dict[str, Points]()
        for evaluation in self.evaluations:
            for key in (key for key in evaluation if key.startswith(prefix)):
                points = found.setdefault(key.removeprefix(prefix), [])
                points.append((float(evaluation["step"]), number(evaluation[key])))
        return dict(sorted(found.items(), key=lambda one: (one[1][-1][1] is None, one[1][-1][1] or 0.0)))

    @cached_property
    def changed_at(self) -> list[float]:
        """The first step after each accepted change of rows or rewards, as far as the steps before it are known."""
        counts = [(float(step["step"]), number(step.get("input_changes")) or 0.0) for step in self.steps]
        return [step for (_, before), (step, now) in pairwise(counts) if now != before]

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


def read_configuration(path: Path, missing: list[str]) -> tuple[str, Record]:
    """Return the file's text and its mapping, both empty where it cannot be read: `missing` gets the reason."""
    try:
        text = path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        missing.append(f"{path.name} {why_nothing(path)}: the run's settings are not known.")
        return "", {}
    try:
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        missing.append(f"{path.name} is no YAML: {str(problem).splitlines()[0]}")
        return text, {}
    return text, parsed if isinstance(parsed, dict) else {}
