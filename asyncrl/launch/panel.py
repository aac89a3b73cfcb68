"""One panel, three questions: is it learning, is the pipeline healthy, what does it write.

Where standard output is no terminal, plain lines instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.launch.story import Story

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
PLAIN_EVERY_STEPS = 20
REFRESH_S = 0.5
MISSING = "-"


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """The whole course in `width` characters: means of equal slices, from lowest to highest bar."""
    if not values:
        return ""
    width = min(width, len(values))
    slices = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in slices]
    low, span = min(means), max(max(means) - min(means), 1e-9)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def number(value: Any, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def render(story: Story) -> RenderableType:
    """The panel of the story so far."""
    total = story.status.get("total_steps")
    step = story.latest.get("step", story.status.get("step", 0))
    title = f"asyncrl  {story.run_dir}   step {step}" + (f" of {total}" if total else "")
    title += f"   {story.status.get('phase', 'starting')}   {duration(story.seconds_left())} left"
    body = Group(
        _section("Is it learning?", _learning(story)),
        _section("Is the pipeline healthy?", _pipeline(story)),
        _section("What does it write?", _samples(story)),
    )
    return Panel(body, title=title, title_align="left", border_style="cyan", padding=(1, 2))


def _section(question: str, content: RenderableType) -> RenderableType:
    return Group(Text(question, style="bold"), content, Text(""))


def _rows(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", min_width=18)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _learning(story: Story) -> RenderableType:
    rewards = [step["reward/mean"] for step in story.steps if step.get("reward/mean") is not None]
    components = "   ".join(
        f"{key.removeprefix('reward/')} {number(value)}"
        for key, value in story.latest.items()
        if key.startswith("reward/") and key not in ("reward/mean", "reward/std")
    )
    held_out = MISSING
    if story.evaluations:
        first, last = story.evaluations[0], story.evaluations[-1]
        held_out = f"{number(first.get('accuracy'))} at step {first.get('step')}"
        if last is not first:
            held_out += f"  ->  {number(last.get('accuracy'))} at step {last.get('step')}"
    return _rows(
        ("reward", f"{number(story.last('reward/mean'))}  {sparkline(rewards)}"),
        ("components", components or MISSING),
        ("held-out accuracy", held_out),
        (
            "optimisation",
            f"loss {number(story.last('loss'), 4)}   grad norm {number(story.last('grad_norm'), 2)}   "
            f"entropy {number(story.last('entropy'))}   lr {story.last('lr') or 0:.2g}",
        ),
    )


def _pipeline(story: Story) -> RenderableType:
    status, latest = story.status, story.latest
    groups = status.get("groups", {})
    servers = status.get("servers", [])
    rows = {key.removeprefix("rows/"): number(value, 0) for key, value in latest.items() if key.startswith("rows/")}
    errors = status.get("errors") or {}
    return _rows(
        (
            "policy version",
            f"{status.get('version', MISSING)}   "
            f"servers at {', '.join(str(s.get('version', MISSING)) for s in servers) or MISSING}   "
            f"staleness mean {number(latest.get('staleness/mean'), 2)}, max {number(latest.get('staleness/max'), 0)}",
        ),
        ("groups", "   ".join(f"{name} {count}" for name, count in groups.items()) or MISSING),
        (
            "idle",
            f"learner {number(story.last('idle/learner'), 2)}   rollout {number(story.last('idle/rollout'), 2)}   "
            f"tokens/s {number(story.last('tokens_per_s/learner'), 0)} and "
            f"{number(story.last('tokens_per_s/rollout'), 0)}",
        ),
        ("off-policy", f"ESS {number(story.last('ess'))}   mismatch KL {number(story.last('mismatch_kl_k3'), 5)}"),
        ("trajectories", "   ".join(f"{name} {count}" for name, count in rows.items()) or MISSING),
        ("waiting for", status.get("waiting_for") or "nothing"),
        ("errors", "   ".join(f"{kind} {count}" for kind, count in errors.items()) or "none"),
    )


def _samples(story: Story) -> RenderableType:
    rows: list[tuple[str, str]] = []
    for name, sample in (("good", story.good), ("bad", story.bad)):
        if sample:
            completion = sample["completion"]
            rows += [
                (f"{name} ({number(completion['reward'], 2)})", _short(completion.get("text", MISSING))),
                ("", f"for {_short(sample.get('prompt', MISSING))}  (answer {_short(sample.get('answer', MISSING))})"),
            ]
    return _rows(*rows) if rows else Text("nothing yet", style="dim")


def _short(text: Any, limit: int = 90) -> str:
    """One line. Control characters are shown, not sent: a model may write escape sequences to your terminal."""
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


class Display(AbstractContextManager["Display"]):
    """Shows the story while a run goes on. Call `tick` often; it is cheap."""

    def __init__(self, story: Story, console: Console | None = None):
        self.story = story
        self.console = console or Console()
        self._live: Live | None = None
        self._refreshed_at = 0.0
        self._told_step = 0
        self._told_evaluations = 0

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live = Live(render(self.story), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        if time.monotonic() - self._refreshed_at >= REFRESH_S:
            self._show()

    def _show(self) -> None:
        self._refreshed_at = time.monotonic()
        self.story.refresh()
        if self._live:
            self._live.update(render(self.story), refresh=True)
        else:
            self._tell()

    def _tell(self) -> None:
        """Plain lines: every evaluation, and a step now and then."""
        for evaluation in self.story.evaluations[self._told_evaluations :]:
            line = f"step {evaluation.get('step')}: held-out accuracy {number(evaluation.get('accuracy'))}"
            rows, errors = evaluation.get("rows", MISSING), evaluation.get("errors", MISSING)
            self._print(f"{line} over {rows} rows, {errors} without a score")
        self._told_evaluations = len(self.story.evaluations)
        step = self.story.latest
        if "step" in step and (step["step"] >= self._told_step + PLAIN_EVERY_STEPS or self._told_step == 0):
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
