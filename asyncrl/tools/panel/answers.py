"""What the panel's three questions are answered with: rows of lines, each made for the room that there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.telemetry.limits import LIMITS
from asyncrl.tools.panel.alerts import alerts
from asyncrl.tools.panel.glyphs import Glyphs, slice_means
from asyncrl.tools.panel.run_snapshot import Story
from asyncrl.tools.panel.wording import MISSING, number, time_left

BETWEEN_FACTS = 3
SPARKLINE_CELLS = 48
RANGE_CELLS = 16
WARNINGS = 3
"""Lines of them."""
PHASE_STYLES = {"training": "green", "evaluating": "cyan", "finished": "bold green", "failed": "bold red"}
Fact = tuple[str, str] | tuple[str, str, str]
"""Name, value and, where it stands out, the value's style."""


@dataclass(frozen=True)
class Row:
    name: str
    lines: list[Text]
    rank: int = 0
    """In a small terminal the highest go first; 0 stays."""


@dataclass(frozen=True)
class Answers:
    """Of a story, in a panel with so many cells beside the names."""

    story: Story
    glyphs: Glyphs
    cells: int
    sample_lines: int

    def progress(self) -> RenderableType:
        total = self.story.status.get("total_steps")
        step = self.story.latest.get("step", self.story.status.get("step", 0))
        if not total:
            return Text(f"step {step}")
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        style = phase_style(self.story.phase)
        bar = ProgressBar(total=total, completed=step, style="bright_black", complete_style=style, finished_style=style)
        row.add_row(Text(f"step {step} of {total}", style="bold"), bar, Text(time_left(self.story)))
        return row

    def _facts(self, *facts: Fact) -> list[Text]:
        """Names in grey, values beside them; a line breaks between facts, never inside one."""
        lines = [Text()]
        for name, value, *style in facts:
            fact = Text.assemble((f"{self.glyphs.line(name)} ", "dim"), (self.glyphs.line(value), "".join(style)))
            gap = BETWEEN_FACTS if lines[-1] else 0
            if gap and lines[-1].cell_len + gap + fact.cell_len > self.cells:
                lines.append(fact)
            else:
                lines[-1].append(" " * gap).append(fact)
        return lines if facts else [Text(MISSING, "dim")]

    # --- is it learning? ---------------------------------------------------------------------------

    def learning(self) -> Iterator[Row]:
        story = self.story
        rewards = [reward for _, reward in story.rewards]
        yield Row("reward", [self._curve(story.last("reward/mean"), rewards, "green")])
        components = [
            (key.removeprefix("reward/"), number(value))
            for key, value in story.latest.items()
            if key.startswith("reward/") and key not in ("reward/mean", "reward/std")
        ]
        if components:
            yield Row("components", self._facts(*components), rank=3)
        yield Row("held-out", [self._held_out()])
        learning_rate = story.last("lr")
        yield Row(
            "optimisation",
            self._facts(
                ("loss", number(story.last("loss"), 4)),
                ("grad norm", number(story.last("grad_norm"), 2)),
                ("entropy", number(story.last("entropy"))),
                ("lr", MISSING if learning_rate is None else f"{learning_rate:.2g}"),
            ),
            rank=1,
        )

    def _curve(self, value: Any, values: list[float], style: str) -> Text:
        """The newest value, a sparkline of all, and its range."""
        shown = Text.assemble((number(value), "bold"), "  ")
        means = slice_means(values, max(1, min(SPARKLINE_CELLS, self.cells - shown.cell_len - RANGE_CELLS)))
        shown.append(self.glyphs.sparkline(means), style)
        return shown.append(f"  {min(means):.2f} to {max(means):.2f}", "dim") if len(means) > 1 else shown

    def _held_out(self) -> Text:
        """Accuracy of the first evaluation and of the latest."""
        if not self.story.evaluations:
            return Text("not evaluated yet", style="dim")
        first, last = self.story.evaluations[0], self.story.evaluations[-1]
        before, after = first.get("accuracy"), last.get("accuracy")
        if last is first:
            return Text.assemble(
                "accuracy ", (number(before), "bold"), (f"  at step {first.get('step', MISSING)}", "dim")
            )
        style = "" if before is None or after is None or before == after else "green" if after > before else "red"
        shown = Text(f"{number(before)} {self.glyphs.arrow} ").append(number(after), f"bold {style}".strip())
        steps = f"  accuracy at steps {first.get('step', MISSING)} and {last.get('step', MISSING)}"
        curve = [e["accuracy"] for e in self.story.evaluations if e.get("accuracy") is not None]
        if len(curve) > 2:
            shown.append("  ").append(self.glyphs.sparkline(slice_means(curve, 16)), style)
        if shown.cell_len + len(steps) <= self.cells:
            shown.append(steps, "dim")
        return shown

    # --- is the pipeline healthy? ------------------------------------------------------------------

    def pipeline(self) -> Iterator[Row]:
        story = self.story
        status, latest = story.status, story.latest
        warnings = [Text(self.glyphs.cut(words, self.cells), "bold yellow") for words in alerts(story).values()]
        if warnings:
            yield Row("WARNING", warnings[:WARNINGS])
        yield Row(
            "policy",
            self._facts(
                ("version", str(status.get("version", MISSING))),
                ("staleness mean", number(latest.get("staleness/mean"), 2)),
                ("max", number(latest.get("staleness/max"), 0)),
                ("of at most", number(latest.get("staleness/bound"), 0)),
            ),
            rank=2,
        )
        yield self._servers()
        device = status.get("device") or {}
        if device:  # learner and server take turns
            holder = str(device.get("holder") or "nobody")
            yield Row("device", self._facts(("held by", holder), ("turn", str(device.get("fence")))), rank=2)
        groups = [(name, str(count)) for name, count in (status.get("groups") or {}).items()]
        yield Row("groups", self._facts(*groups), rank=3)
        seconds = story.last("step_s")
        yield Row(
            "learner", self._side("learner", ("step", MISSING if seconds is None else f"{seconds:.2f} s")), rank=1
        )
        yield Row("rollout", self._side("rollout"), rank=1)
        off_policy = (("ESS", number(story.last("ess"))), ("mismatch KL", number(story.last("mismatch_kl_k3"), 5)))
        yield Row("off-policy", self._facts(*off_policy), rank=2)
        rows = [(key.removeprefix("rows/"), value) for key, value in latest.items() if key.startswith("rows/")]
        yield Row(
            "trajectories", self._facts(*((name, number(value, 0)) for name, value in rows if value != 0)), rank=3
        )
        if story.notes:
            yield Row("restarts", [Text(self.glyphs.cut(story.notes[-1], self.cells), "yellow")])
        yield self._waiting()
        errors = [(kind, str(count), "red") for kind, count in (status.get("errors") or {}).items()]
        yield Row("errors", self._facts(*errors) if errors else [Text("none", "dim")])

    def _servers(self) -> Row:
        servers = self.story.status.get("servers") or []
        if not servers:
            return Row("servers", [Text("none connected", "yellow")], rank=1)
        behind = ", ".join(str(server.get("version", MISSING)) for server in servers)
        return Row("servers", self._facts((f"{len(servers)} at version", behind)), rank=1)

    def _side(self, side: str, *more: Fact) -> list[Text]:
        """Servers that wait are no fault: `max_staleness` holds them, or the learner is the slower one."""
        idle = self.story.last(f"idle/{side}")
        starves = side == "learner" and idle is not None and idle > LIMITS["LearnerStarves"].value
        return self._facts(
            ("tokens/s", number(self.story.last(f"tokens_per_s/{side}"), 0)),
            ("idle", MISSING if idle is None else f"{idle:.0%}", "yellow" if starves else ""),
            *more,
        )

    def _waiting(self) -> Row:
        """One line whatever its length: the panel should not jump while it is being read."""
        why = self.glyphs.cut(self.story.status.get("waiting_for") or "", self.cells)
        if self.story.has_ended:
            return Row("ended", [Text(why, "red") if why else Text(self.story.phase, "dim")])
        idle = "nothing" if self.story.status else "the first word of the learner"
        return Row("waiting for", [Text(why, "yellow") if why else Text(idle, "dim")])

    # --- what does it write? -----------------------------------------------------------------------

    def samples(self) -> Iterator[Row]:
        previous: Text | None = None
        for name, style, sample in (("good", "green", self.story.good), ("bad", "red", self.story.bad)):
            if not sample:
                continue
            prompt = self._prompt(sample)
            if prompt != previous:
                yield Row("prompt", [prompt])
                previous = prompt
            completion = sample["completion"]
            text = self.glyphs.lines(completion.get("text", MISSING), self.cells, self.sample_lines)
            lines = [Text(line, style) for line in text if line] or [Text("(empty)", style)]
            yield Row(f"{name} {number(completion['reward'], 2)}", lines)
        if previous is None:
            yield Row("nothing yet", [Text("")])

    def _prompt(self, sample: dict[str, Any]) -> Text:
        """With the answer, which the prompt leaves room for."""
        answer = self.glyphs.cut(sample.get("answer", MISSING), self.cells // 3)
        step = f"  step {sample.get('step', MISSING)}"
        room = self.cells - cell_len(answer) - len("  answer ") - len(step)
        return Text.assemble(
            self.glyphs.cut(sample.get("prompt", MISSING), max(room, 1)), ("  answer ", "dim"), answer, (step, "dim")
        )


def phase_style(phase: str) -> str:
    return PHASE_STYLES.get(phase, "yellow")
