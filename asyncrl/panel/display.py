"""Display of a run while it goes on: a live panel or, where standard output is no terminal, plain lines."""

from __future__ import annotations

import io
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.live import Live

from asyncrl.errors import ExitCode, UserError
from asyncrl.panel.console import Console
from asyncrl.panel.formatting import MISSING, number, one_line, time_left
from asyncrl.panel.panel import RunPanel
from asyncrl.panel.run_snapshot import RunSnapshot
from asyncrl.run_folder.failure import read_failure
from asyncrl.telemetry.reading import is_there, unreadable_as_user_error
from asyncrl.telemetry.recorder import METRICS_FILE, STATUS_FILE

PLAIN_EVERY_STEPS = 20
REFRESH_S = 1.0
LONGEST_REFRESH_S = 5.0
DRAWING_SHARE = 0.005
"""Share of one CPU. A picture that takes more than its share of a second delays the next one: slow machines, which have
the least to spare, would pay the most for the same panel."""
STUCK_S = 60.0
"""Seconds without a step before plain lines say what the run waits for; each time doubles them."""
COMES_BACK_S = 30.0
"""Seconds within which a learner that failed may be started again."""


class Display(AbstractContextManager["Display"]):
    """Shows a run while it goes on. Call `tick` often; it is cheap."""

    def __init__(self, run: RunSnapshot, console: Console | None = None, *, from_the_start: bool = False):
        """Plain lines report what is new; `from_the_start` also what the run has written before."""
        self.run = run
        self.console = console or _stdout_console()
        self._from_the_start = from_the_start
        self._live: Live | None = None
        self._size = self.console.size
        self._refreshed_at = 0.0
        self._pause_s = 0.0
        self._printed_step = 0
        self._printed_evaluations: list[dict[str, Any]] = []
        self._printed_warnings: set[str] = set()
        self._last_step = 0
        self._new_step_at = time.monotonic()
        self._stuck_s = STUCK_S

    def __enter__(self) -> Display:
        self.run.refresh()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(RunPanel(self.run), console=self.console, auto_refresh=False)
            self._live.start()
        if not self._from_the_start:  # the run that this one resumes has printed it
            self._printed_step, self._printed_evaluations = self.run.latest.get("step", 0), self.run.evaluations
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._show(last=True)
        finally:  # the terminal gets its cursor back after any error
            if self._live:
                self._live.stop()

    def note(self, line: str) -> None:
        """Show an event that is not in the run directory, such as a crash: a row of the panel, or a line."""
        line = f"{time.strftime('%H:%M:%S')} {line}"
        self.run.notes.append(line)
        if self._live:
            self._show()
        else:
            self._print(line)

    def tick(self) -> None:
        if time.monotonic() - self._refreshed_at >= self._pause_s:
            self._show()

    def _show(self, last: bool = False) -> None:
        began = time.thread_time()
        self.run.refresh()
        if self._live is None:
            self._print_news(last)
        else:
            if self.console.size != self._size:  # the terminal has broken the old frame's lines elsewhere
                self._size = self.console.size
                self.console.clear()
            self._live.refresh()
        self._refreshed_at = time.monotonic()
        self._pause_s = min(max(REFRESH_S, (time.thread_time() - began) / DRAWING_SHARE), LONGEST_REFRESH_S)

    def _print_news(self, last: bool) -> None:
        """Plain lines: every evaluation and warning, the first step, the last one and one now and then, long waits."""
        step = self.run.latest.get("step", 0)
        if step < self._printed_step:  # a resumed learner cuts back to its checkpoint
            self._printed_step = 0
        for evaluation in self.run.evaluations:
            if evaluation not in self._printed_evaluations:
                self._print(_evaluation_line(evaluation))
        self._printed_evaluations = self.run.evaluations
        pause = 1 if last or self._printed_step == 0 else PLAIN_EVERY_STEPS
        if step >= self._printed_step + pause:
            self._printed_step = step
            self._print(_step_line(self.run))
        warnings = self.run.warnings()
        for name in warnings.keys() - self._printed_warnings:
            self._print(f"warning: {warnings[name]}")
        self._printed_warnings |= warnings.keys()  # once: some come and go with every look
        now = time.monotonic()
        if step != self._last_step or self.run.has_ended:
            self._last_step, self._new_step_at, self._stuck_s = step, now, STUCK_S
        elif now - self._new_step_at >= self._stuck_s:
            waiting = self.run.waiting_for or "nothing"
            self._print(f"step {step}: no new step for {self._stuck_s:.0f} s, {self.run.phase}, waiting for {waiting}")
            self._stuck_s *= 2

    def _print(self, line: str) -> None:
        self.console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)


def watch(run_dir: Path) -> int:
    """Show a run that another process makes, until it has ended: 0 if it is finished, else 1. Only reads.

    Raises UserError where there is no run, or its files cannot be read.
    """
    if not [name for name in (STATUS_FILE, METRICS_FILE) if is_there(run_dir / name)]:
        raise UserError(f"there is no run in {run_dir}: it has neither {STATUS_FILE} nor {METRICS_FILE}")
    with unreadable_as_user_error(), Display(RunSnapshot(run_dir), from_the_start=True) as display:
        while not _is_over(display.run):
            display.tick()
            is_there(run_dir / STATUS_FILE)  # raises where it has become another user's: its last words would stay
            time.sleep(REFRESH_S / 4)
    if display.run.phase == "finished":
        return ExitCode.FINISHED
    failure = read_failure(run_dir)
    why = f" ({failure.kind}): {failure.reason}" if failure else ""
    step = display.run.status.get("step", 0)
    print(f"{run_dir} ended at step {step}{why}. To go on: asyncrl train {run_dir}/config.yaml --resume")
    return ExitCode.CRASHED


def _is_over(run: RunSnapshot) -> bool:
    silent_s = time.time() - run.status.get("time", 0.0)
    return run.phase == "finished" or (run.has_ended and silent_s > COMES_BACK_S)


def _stdout_console() -> Console:
    """A console for standard output. FORCE_COLOR in the environment does not make a terminal of a file."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever is printed, a run does not end by it
    return Console(force_terminal=None if sys.stdout.isatty() else False)


def _evaluation_line(evaluation: dict[str, Any]) -> str:
    rows, errors = evaluation.get("rows", MISSING), evaluation.get("errors", MISSING)
    accuracy = number(evaluation.get("accuracy"))
    return f"step {evaluation.get('step')}: held-out accuracy {accuracy} over {rows} rows, {errors} without a score"


def _step_line(run: RunSnapshot) -> str:
    step, total = run.latest, run.status.get("total_steps")
    return (
        f"step {step['step']}{f' of {total}' if total else ''}: "
        f"reward {number(step.get('reward/mean'))}, staleness {number(step.get('staleness/mean'), 1)}, "
        f"entropy {number(step.get('entropy'))}, {number(step.get('step_s'), 2)} s per step, "
        f"idle learner {number(run.last('idle/learner'), 2)} rollout {number(run.last('idle/rollout'), 2)}, "
        f"{time_left(run) or 'time left unknown'}"
    )
