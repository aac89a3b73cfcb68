"""Display of a run while it goes on: a live panel in a terminal or a notebook, elsewhere plain lines and warnings."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.live import Live

from asyncrl.errors import ExitCode, UserError, pasted
from asyncrl.launch.display import REFRESH_S, Display
from asyncrl.run_folder.failure import is_there, read_failure, unreadable_as_user_error
from asyncrl.telemetry.recorder import CONFIG_FILE, METRICS_FILE, STATUS_FILE
from asyncrl_plugins.viewer.panel.console import Console
from asyncrl_plugins.viewer.panel.notebook import NotebookPanel, in_notebook
from asyncrl_plugins.viewer.panel.panel import RunPanel
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot

LONGEST_REFRESH_S = 5.0
DRAWING_SHARE = 0.005
"""Share of one CPU. A picture that takes more than its share of a second delays the next one: slow machines, which have
the least to spare, would pay the most for the same panel."""
COMES_BACK_S = 30.0
"""Seconds within which a learner that failed may be started again."""


class RunDisplay(Display):
    run: RunSnapshot

    def __init__(self, run: RunSnapshot, console: Console | None = None, *, from_the_start: bool = False) -> None:
        super().__init__(run, from_the_start=from_the_start)
        # FORCE_COLOR in the environment does not make a terminal of a file.
        self._console = console or Console(force_terminal=None if sys.stdout.isatty() else False)
        self._live: Live | NotebookPanel | None = None
        self._size = self._console.size
        self._drawn_at = self._pause_s = 0.0

    def __enter__(self) -> RunDisplay:
        super().__enter__()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(RunPanel(self.run), console=self._console, auto_refresh=False)
            self._live.start()
        elif in_notebook():
            self._live = NotebookPanel(RunPanel(self.run))
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.show()
        finally:  # the terminal gets its cursor back after any error
            if self._live:
                self._live.stop()

    def note(self, line: str) -> None:
        """Show an event that is not in the run directory, such as a crash: a row of the panel, or a line."""
        if self._live is None:
            super().note(line)
        else:
            self.run.notes.append(f"{time.strftime('%H:%M:%S')} {line}")
            self.show()

    def tick(self) -> None:
        if self._live is None:
            super().tick()
        elif time.monotonic() - self._drawn_at >= self._pause_s:
            self.show()

    def show(self) -> None:
        if self._live is None:
            super().show()
            return
        began = time.thread_time()
        self.run.refresh()
        if self._console.size != self._size:  # the terminal has broken the old frame's lines elsewhere
            self._size = self._console.size
            self._console.clear()
        self._live.refresh()
        self._drawn_at = time.monotonic()
        self._pause_s = min(max(REFRESH_S, (time.thread_time() - began) / DRAWING_SHARE), LONGEST_REFRESH_S)


def open_panel(run_dir: Path, since: float) -> RunDisplay:
    return RunDisplay(RunSnapshot(run_dir, since))


def watch(run_dir: Path) -> int:
    """Show a run that another process makes, until it has ended: 0 if it is finished, else 1. Only reads.

    Raises UserError where there is no run, or its files cannot be read.
    """
    if not [name for name in (STATUS_FILE, METRICS_FILE) if is_there(run_dir / name)]:
        raise UserError(f"there is no run in {run_dir}: it has neither {STATUS_FILE} nor {METRICS_FILE}")
    with unreadable_as_user_error(), RunDisplay(RunSnapshot(run_dir), from_the_start=True) as display:
        while not _is_over(display.run):
            display.tick()
            is_there(run_dir / STATUS_FILE)  # raises where it has become another user's: its last words would stay
            time.sleep(REFRESH_S / 4)
    if display.run.phase == "finished":
        return ExitCode.FINISHED
    failure = read_failure(run_dir)
    why = f" ({failure.kind}): {failure.reason}" if failure else ""
    step = display.run.status.get("step", 0)
    print(f"{run_dir} ended at step {step}{why}. To go on: asyncrl train {pasted(run_dir / CONFIG_FILE)} --resume")
    return ExitCode.CRASHED


def _is_over(run: RunSnapshot) -> bool:
    silent_s = time.time() - run.status.get("time", 0.0)
    return run.phase == "finished" or (run.has_ended and silent_s > COMES_BACK_S)
