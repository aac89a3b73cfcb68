"""`asyncrl watch`: the panel of a run that another process makes, such as the learner of a container."""

from __future__ import annotations

import time
from pathlib import Path

from asyncrl.errors import ExitCode, UserError
from asyncrl.telemetry.reading import is_there, telling_unreadable
from asyncrl.telemetry.recorder import METRICS_FILE, STATUS_FILE
from asyncrl.tools.panel.display import REFRESH_S, Display
from asyncrl.tools.panel.run_snapshot import Story

COMES_BACK_S = 30.0
"""A learner that failed may be started again within this time."""


def watch(run_dir: Path) -> int:
    """Until the run has ended; 0 if it is finished, else 1. Reads the run directory, and no more.

    Raises UserError where there is no run, or its files cannot be read.
    """
    there = [name for name in (STATUS_FILE, METRICS_FILE) if is_there(run_dir / name)]
    if not there:
        raise UserError(f"there is no run in {run_dir}: it has neither {STATUS_FILE} nor {METRICS_FILE}")
    with telling_unreadable(), Display(Story(run_dir), from_the_start=True) as display:
        while not _is_over(display.story):
            display.tick()
            is_there(run_dir / STATUS_FILE)  # raises where it has become another user's: its last words would stay
            time.sleep(REFRESH_S / 4)
    return ExitCode.FINISHED if display.story.phase == "finished" else ExitCode.CRASHED


def _is_over(story: Story) -> bool:
    silent_s = time.time() - story.status.get("time", 0.0)
    return story.phase == "finished" or (story.has_ended and silent_s > COMES_BACK_S)
