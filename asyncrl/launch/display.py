"""Display of a run in plain lines: steps, evaluations and long waits. A plug-in may bring another one."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from asyncrl import plugins
from asyncrl.rewards.score import accuracies_by_label
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import EVALUATIONS_FILE, METRICS_FILE, read_status
from asyncrl.telemetry.wasted_steps import (
    FEW_GROUPS,
    LEARNS_NOTHING,
    LEAST_GROUPS,
    LEAST_STEPS,
    few_groups_left,
    without_spread,
)

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
    first_steps: list[dict[str, Any]] = field(default_factory=list)
    """The first LEAST_STEPS of the run."""
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
        self.first_steps = (([] if restarted else self.first_steps) + records)[:LEAST_STEPS]

    @property
    def own_steps(self) -> list[dict[str, Any]]:
        """Steps since this start of the run: what was wrong with those of an earlier one may have been mended."""
        if self.since and not self.status:
            return []
        times = [step.get("time") for step in self.steps]
        is_own = [not isinstance(at, int | float) or at >= self.since for at in times]
        return [step for step, own in zip(self.steps, is_own, strict=True) if own]

    @property
    def latest(self) -> dict[str, Any]:
        return self.steps[-1] if self.steps else {}

    def last(self, key: str) -> Any:
        """The newest value of a metric; slow metrics are not in every step."""
        return next((step[key] for step in reversed(self.steps[-50:]) if step.get(key) is not None), None)

    def warnings(self) -> dict[str, str]:
        """Active problems of a running run, by subject."""
        found = "" if self.has_ended else without_spread(self.own_steps, self.groups_per_step)
        groups = self.status.get("groups")
        if isinstance(groups, dict) and not groups.get("trained") and not self.has_ended:
            dropped = groups.get("dropped")
            if isinstance(dropped, int) and dropped >= LEAST_GROUPS:
                found = f"all {dropped} groups so far were dropped by algorithm.filters"
        warnings = {LEARNS_NOTHING: f"{LEARNS_NOTHING}: {found}"} if found else {}
        if not self.has_ended and (few := few_groups_left(self.first_steps, self.own_steps)):
            warnings[FEW_GROUPS] = f"{FEW_GROUPS}: {few}"
        if changed := str(self.status.get("inputs_changed") or ""):
            warnings["Other inputs"] = changed
        return warnings

    @property
    def groups_per_step(self) -> float:
        """Groups of a step that does not record their number; 0 where that is not known."""
        return 0.0

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


def scored_alike(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations since the last accepted change of rewards or held-out rows: earlier ones do not compare with them."""
    mark = [evaluation.get("scoring_changes", 0) for evaluation in evaluations]
    return [evaluation for evaluation, one in zip(evaluations, mark, strict=True) if one == mark[-1]]


REFRESH_S = 1.0
STUCK_S = 60.0
"""Seconds without a step before a line says what the run waits for; each time doubles them."""
MISSING = "-"


class Display(AbstractContextManager["Display"]):
    """Shows a run while it goes on: at most one line a second for the newest step. Call `tick` often; it is cheap."""

    def __init__(self, run: RunProgress, *, from_the_start: bool = False) -> None:
        """Show what is new; `from_the_start` also what the run has written before."""
        self.run = run
        self._from_the_start = from_the_start
        self._printed_step = 0
        self._printed_evaluations: list[dict[str, Any]] = []
        self._printed_warnings: set[str] = set()
        self._refreshed_at = self._new_step_at = time.monotonic()
        self._stuck_s = STUCK_S

    def __enter__(self) -> Display:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # whatever is printed, a run does not end by it
        self.run.refresh()
        if not self._from_the_start:  # the run that this one resumes has printed it
            self._printed_step, self._printed_evaluations = self.run.latest.get("step", 0), self.run.evaluations
        return self

    def __exit__(self, *_: object) -> None:
        self.show()

    def note(self, line: str) -> None:
        """Show an event that is not in the run directory, such as a crash."""
        self.print(f"{time.strftime('%H:%M:%S')} {line}")

    def tick(self) -> None:
        if time.monotonic() - self._refreshed_at >= REFRESH_S:
            self.show()

    def show(self) -> None:
        """Read the run directory and print what is new."""
        self.run.refresh()
        self._refreshed_at = now = time.monotonic()
        for evaluation in self.run.evaluations:
            if evaluation not in self._printed_evaluations:
                self.print(_evaluation_line(evaluation))
        self._printed_evaluations = self.run.evaluations
        warnings = self.run.warnings()
        for name in warnings.keys() - self._printed_warnings:
            self.print(f"warning: {warnings[name]}")
        self._printed_warnings |= warnings.keys()  # once: some come and go with every look
        step = self.run.latest.get("step", self._printed_step)
        if step != self._printed_step or self.run.has_ended:
            if step != self._printed_step:  # a resumed learner cuts back to its checkpoint
                self.print(_step_line(self.run))
            self._printed_step = step
            self._new_step_at, self._stuck_s = now, STUCK_S
        elif now - self._new_step_at >= self._stuck_s:
            waiting = f", waiting for {self.run.waiting_for}" if self.run.waiting_for else ""
            self.print(f"step {step}: no new step for {self._stuck_s:.0f} s, {self.run.phase}{waiting}")
            self._stuck_s *= 2

    def print(self, line: str) -> None:
        print(one_line(line), flush=True)


def open_display(run_dir: Path, since: float) -> Display:
    """Display of a run that begins now (Unix seconds): an installed plug-in's, or plain lines."""
    for name in plugins.installed("displays"):
        return plugins.implementation(plugins.description("displays", name).implementation)(run_dir, since)
    return Display(RunProgress(run_dir, since))


def one_line(text: object) -> str:
    """The text on one line. Characters that cannot be printed show as codes: a model may write escape sequences."""
    words = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def number(value: Any, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:z.{digits}f}"


def _evaluation_line(evaluation: dict[str, Any]) -> str:
    rows, errors = evaluation.get("rows", MISSING), evaluation.get("errors", MISSING)
    accuracy, parts = number(evaluation.get("accuracy")), accuracies_by_label(evaluation)
    said = f"step {evaluation.get('step')}: held-out accuracy {accuracy} over {rows} rows, {errors} without a score"
    return f"{said}; {parts}" if parts else said


def _step_line(run: RunProgress) -> str:
    step, total = run.latest, run.status.get("total_steps")
    return (
        f"step {step['step']}{f' of {total}' if total else ''}: reward {number(step.get('reward/mean'))}, "
        f"staleness {number(step.get('staleness/mean'), 1)}, {number(step.get('step_s'), 2)} s, "
        f"{number(run.last('tokens_per_s/learner'), 0)} tokens/s, "
        f"idle learner {number(run.last('idle/learner'), 2)} rollout {number(run.last('idle/rollout'), 2)}"
    )
