"""The story of a run while it goes on: a live panel or, where standard output is no terminal, plain lines."""

from __future__ import annotations

import io
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from rich.live import Live

from asyncrl.launch.console import Console
from asyncrl.tools.panel.alerts import alerts
from asyncrl.tools.panel.glyphs import Glyphs
from asyncrl.tools.panel.panel import RunPanel
from asyncrl.tools.panel.run_snapshot import Story
from asyncrl.tools.panel.wording import MISSING, number, time_left

PLAIN_EVERY_STEPS = 20
REFRESH_S = 1.0
LONGEST_REFRESH_S = 5.0
DRAWING_SHARE = 0.005
"""Of one CPU. Where a picture takes more than its share of a second, the next one comes later: slow machines, which
have the least to spare, would pay the most for the same panel."""
STUCK_S = 60.0
"""Without a step; plain lines then say what is waited for, each time after twice as long."""


class Display(AbstractContextManager["Display"]):
    """Shows the story while a run goes on. Call `tick` often; it is cheap."""

    def __init__(self, story: Story, console: Console | None = None, *, from_the_start: bool = False):
        """Plain lines tell what is new; `from_the_start` also what was there before."""
        self.story = story
        self.console = console or _console()
        self._glyphs = Glyphs.of(self.console.encoding)
        self._from_the_start = from_the_start
        self._live: Live | None = None
        self._size = self.console.size
        self._refreshed_at = 0.0
        self._pause_s = 0.0
        self._told_step = 0
        self._told_evaluations: list[dict[str, Any]] = []
        self._told_alerts: set[str] = set()
        self._last_step = 0
        self._new_step_at = time.monotonic()
        self._stuck_s = STUCK_S

    def __enter__(self) -> Display:
        self.story.refresh()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(RunPanel(self.story), console=self.console, auto_refresh=False)
            self._live.start()
        if not self._from_the_start:  # it was told by the run that this one resumes
            self._told_step, self._told_evaluations = self.story.latest.get("step", 0), self.story.evaluations
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._show(last=True)
        finally:  # whatever it meets, the terminal gets its cursor back
            if self._live:
                self._live.stop()

    def note(self, line: str) -> None:
        """Something that the run directory does not say, such as a crash: a row of the panel, or a line."""
        line = f"{time.strftime('%H:%M:%S')} {line}"
        self.story.notes.append(line)
        if self._live:
            self._show()
        else:
            self._print(line)

    def tick(self) -> None:
        if time.monotonic() - self._refreshed_at >= self._pause_s:
            self._show()

    def _show(self, last: bool = False) -> None:
        began = time.thread_time()
        self.story.refresh()
        if self._live is None:
            self._tell(last)
        else:
            self._draw(self._live)
        self._refreshed_at = time.monotonic()
        self._pause_s = min(max(REFRESH_S, (time.thread_time() - began) / DRAWING_SHARE), LONGEST_REFRESH_S)

    def _draw(self, live: Live) -> None:
        if self.console.size != self._size:  # the terminal has broken the old frame's lines elsewhere
            self._size = self.console.size
            self.console.clear()
        live.refresh()

    # --- plain lines -------------------------------------------------------------------------------

    def _tell(self, last: bool) -> None:
        """Every evaluation and warning, the first step, the last one and one now and then, and long waits."""
        step = self.story.latest.get("step", 0)
        if step < self._told_step:  # a resumed learner cuts back to its checkpoint
            self._told_step = 0
        for evaluation in self.story.evaluations:
            if evaluation not in self._told_evaluations:
                self._print(_evaluation_line(evaluation))
        self._told_evaluations = self.story.evaluations
        pause = 1 if last or self._told_step == 0 else PLAIN_EVERY_STEPS
        if step >= self._told_step + pause:
            self._told_step = step
            self._print(_step_line(self.story))
        self._tell_alerts()
        self._tell_wait(step)

    def _tell_alerts(self) -> None:
        """As each begins."""
        now = alerts(self.story)
        for name in now.keys() - self._told_alerts:
            self._print(f"warning: {now[name]}")
        self._told_alerts = set(now)

    def _tell_wait(self, step: int) -> None:
        now = time.monotonic()
        if step != self._last_step or self.story.has_ended:
            self._last_step, self._new_step_at, self._stuck_s = step, now, STUCK_S
        elif now - self._new_step_at >= self._stuck_s:
            waiting = self.story.status.get("waiting_for") or "nothing that the learner has said"
            self._print(f"step {step}: no other for {self._stuck_s:.0f} s, {self.story.phase}, waiting for {waiting}")
            self._stuck_s *= 2

    def _print(self, line: str) -> None:
        self.console.print(self._glyphs.line(line), markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    """Of standard output. FORCE_COLOR in the environment does not make a terminal of a file."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever is printed, a run does not end by it
    return Console(force_terminal=None if sys.stdout.isatty() else False)


def _evaluation_line(evaluation: dict[str, Any]) -> str:
    rows, errors = evaluation.get("rows", MISSING), evaluation.get("errors", MISSING)
    accuracy = number(evaluation.get("accuracy"))
    return f"step {evaluation.get('step')}: held-out accuracy {accuracy} over {rows} rows, {errors} without a score"


def _step_line(story: Story) -> str:
    step = story.latest
    return (
        f"step {step['step']} of {story.status.get('total_steps', '?')}: "
        f"reward {number(step.get('reward/mean'))}, staleness {number(step.get('staleness/mean'), 1)}, "
        f"entropy {number(step.get('entropy'))}, {number(step.get('step_s'), 2)} s per step, "
        f"idle learner {number(story.last('idle/learner'), 2)} rollout {number(story.last('idle/rollout'), 2)}, "
        f"{time_left(story) or 'time left unknown'}"
    )
