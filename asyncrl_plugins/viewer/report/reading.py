"""Read a whole run directory, however the run ended. What is missing or broken becomes a sentence, never an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.launch.display import has_step
from asyncrl.run_folder.failure import FAILURE_FILE, is_there, read_failure
from asyncrl.telemetry.host_versions import ENVIRONMENT_FILE, read_starts
from asyncrl.telemetry.jsonl import read_records
from asyncrl.telemetry.recorder import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    STATUS_FILE,
    TIMELINE_FILE,
    read_status,
)
from asyncrl_plugins.viewer.recorded_run.run import (
    DAMAGED,
    NOT_THERE,
    Record,
    RecordedRun,
    number,
    read_configuration,
    why_nothing,
)

SIGNS = (STATUS_FILE, METRICS_FILE, JOURNAL_FILE, FAILURE_FILE)
"""Files that mark a directory as a run's, each of them alone."""


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


def _is_span(record: Record) -> bool:
    since, until = number(record.get("since")), number(record.get("until"))
    named = isinstance(record.get("who"), str) and isinstance(record.get("what"), str)
    return named and since is not None and until is not None and since <= until
