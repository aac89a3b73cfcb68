"""The story of a run while it goes on: a live panel or, where standard output is no terminal, plain lines."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from asyncrl.launch.panel import MISSING, duration, number, render
from asyncrl.launch.story import Story

PLAIN_EVERY_STEPS = 20
REFRESH_S = 0.5
FULL_LINES = 32
"""Of a terminal that has room for the panel with its blank lines, some values in two lines."""


class Display(AbstractContextManager["Display"]):
    """Shows the story while a run goes on. Call `tick` often; it is cheap."""

    def __init__(self, story: Story, console: Console | None = None):
        self.story = story
        self.console = console or Console()
        self._live: Live | None = None
        self._refreshed_at = 0.0
        self._told_step = 0
        self._told_evaluations: list[dict[str, Any]] = []

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live = Live(self._panel(), console=self.console, auto_refresh=False)
            self._live.start()
        # What is there already was told by the run that this one resumes.
        self.story.refresh()
        self._told_step, self._told_evaluations = self.story.latest.get("step", 0), self.story.evaluations
        return self

    def __exit__(self, *_: object) -> None:
        self._show(last=True)
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
        if time.monotonic() - self._refreshed_at >= REFRESH_S:
            self._show()

    def _show(self, last: bool = False) -> None:
        self._refreshed_at = time.monotonic()
        self.story.refresh()
        if self._live:
            self._live.update(self._panel(), refresh=True)
        else:
            self._tell(last)

    def _panel(self) -> RenderableType:
        return render(self.story, compact=self.console.height < FULL_LINES)

    def _tell(self, last: bool) -> None:
        """Plain lines: every evaluation, and the first step, the last one and one now and then between them."""
        step = self.story.latest
        if step.get("step", 0) < self._told_step:  # a resumed learner cuts back to its checkpoint
            self._told_step = 0
        for evaluation in self.story.evaluations:
            if evaluation in self._told_evaluations:
                continue
            line = f"step {evaluation.get('step')}: held-out accuracy {number(evaluation.get('accuracy'))}"
            rows, errors = evaluation.get("rows", MISSING), evaluation.get("errors", MISSING)
            self._print(f"{line} over {rows} rows, {errors} without a score")
        self._told_evaluations = self.story.evaluations
        pause = 1 if last or self._told_step == 0 else PLAIN_EVERY_STEPS
        if step.get("step", 0) >= self._told_step + pause:
            self._told_step = step["step"]
            self._print(
                f"step {step['step']} of {self.story.status.get('total_steps', '?')}: "
                f"reward {number(step.get('reward/mean'))}, staleness {number(step.get('staleness/mean'), 1)}, "
                f"entropy {number(step.get('entropy'))}, {number(step.get('step_s'), 2)} s per step, "
                f"idle learner {number(self.story.last('idle/learner'), 2)} "
                f"rollout {number(self.story.last('idle/rollout'), 2)}, {duration(self.story.seconds_left())} left"
            )

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
