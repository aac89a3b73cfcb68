"""Answers to the panel's three questions: rows of lines, each made for the room that the panel has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from asyncrl.launch.display import MISSING, number, one_line, scored_alike
from asyncrl.rewards.score import accuracies_by_label
from asyncrl_plugins.viewer.panel.formatting import cut, cut_lines, slice_means, sparkline, time_left
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import THRESHOLDS

BETWEEN_FACTS = 3
SPARKLINE_CELLS = 48
RANGE_CELLS = 16
STALENESS = (("staleness mean", "mean", 2), ("max", "max", 0), ("of at most", "bound", 0))
"""Names of facts, keys and digits."""
WARNINGS, LINES_OF_WARNING = 4, 3
"""Most lines of warnings, and of one: its numbers stand at its end."""
PHASE_STYLES = {"training": "green", "evaluating": "cyan", "finished": "bold green", "failed": "bold red"}
Fact = tuple[str, str] | tuple[str, str, str]
"""Name, value and, where it stands out, the value's style."""


@dataclass(frozen=True)
class PanelRow:
    name: str
    lines: list[Text]
    rank: int = 0
    """Rows of the highest rank are left out first in a small terminal; 0 stays."""


@dataclass(frozen=True)
class Answers:
    """Answers about one run, in lines of so many cells."""

    run: RunSnapshot
    cells: int
    sample_lines: int

    def progress(self) -> RenderableType:
        total = self.run.status.get("total_steps")
        step = self.run.latest.get("step", self.run.status.get("step", 0))
        if not total:
            return Text(f"step {step}")
        columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right")
        row = Table.grid(*columns, padding=(0, 2), expand=True)
        style = phase_style(self.run.phase)
        bar = ProgressBar(total=total, completed=step, style="bright_black", complete_style=style, finished_style=style)
        row.add_row(Text(f"step {step} of {total}", style="bold"), bar, Text(time_left(self.run)))
        return row

    def _row(self, row: str, rank: int, *facts: Fact) -> PanelRow:
        """Return names in grey, values beside them; a line breaks between facts, never inside one."""
        lines = [Text()]
        for name, value, *style in facts:
            fact = Text.assemble((f"{one_line(name)} ", "dim"), (one_line(value), "".join(style)))
            gap = BETWEEN_FACTS if lines[-1] else 0
            if gap and lines[-1].cell_len + gap + fact.cell_len > self.cells:
                lines.append(fact)
            else:
                lines[-1].append(" " * gap).append(fact)
        return PanelRow(row, lines if facts else [Text(MISSING, "dim")], rank)

    def learning(self) -> Iterator[PanelRow]:
        run = self.run
        if run.is_starting:
            yield PanelRow("held-out", [self._held_out()])
            return
        yield PanelRow("reward", [self._curve(run.last("reward/mean"), [y for _, y in run.rewards if y is not None])])
        skipped = ("reward/mean", "reward/std")
        scored = {key: value for key, value in run.latest.items() if key[:7] == "reward/" and key not in skipped}
        if scored:
            yield self._row("components", 3, *((key[7:], number(value)) for key, value in scored.items()))
        yield PanelRow("held-out", [self._held_out()])
        if parts := self.run.evaluations and accuracies_by_label(self.run.evaluations[-1]):
            yield PanelRow("by value", [Text(cut(parts, self.cells))], rank=2)
        rate = run.last("lr")
        loss, entropy = ("loss", number(run.last("loss"), 4)), ("entropy", number(run.last("entropy")))
        if why := run.untrained_because:
            yield self._row("optimisation", 1, ("policy trained", why, "yellow"), loss, entropy)
            return
        moved = ("grad norm", number(run.last("grad_norm"), 2)), ("lr", MISSING if rate is None else f"{rate:.2g}")
        yield self._row("optimisation", 1, loss, moved[0], entropy, moved[1])

    def _curve(self, newest: Any, values: list[float]) -> Text:
        """The newest value, a sparkline of all, and its range."""
        shown = Text.assemble((number(newest), "bold"), "  ")
        means = slice_means(values, max(1, min(SPARKLINE_CELLS, self.cells - shown.cell_len - RANGE_CELLS)))
        shown.append(sparkline(means), "green")
        return shown.append(f"  {min(means):.2f} to {max(means):.2f}", "dim") if len(means) > 1 else shown

    def _held_out(self) -> Text:
        """Accuracy of the first evaluation and of the latest."""
        if not self.run.evaluations:
            return Text("not evaluated yet", style="dim")
        alike = scored_alike(self.run.evaluations)
        first, last = alike[0], alike[-1]
        before, after = first.get("accuracy"), last.get("accuracy")
        if last is first:
            step = f"  at step {first.get('step', MISSING)}"
            return Text.assemble("accuracy ", (number(before), "bold"), (step, "dim"))
        style = "" if before is None or after is None or before == after else "green" if after > before else "red"
        shown = Text(f"{number(before)} → ").append(number(after), f"bold {style}".strip())
        steps = f"  accuracy at steps {first.get('step', MISSING)} and {last.get('step', MISSING)}"
        curve = [e["accuracy"] for e in alike if e.get("accuracy") is not None]
        if len(curve) > 2:
            shown.append("  ").append(sparkline(slice_means(curve, 16)), style)
        if shown.cell_len + len(steps) <= self.cells:
            shown.append(steps, "dim")
        return shown

    def pipeline(self) -> Iterator[PanelRow]:
        run, status, latest = self.run, self.run.status, self.run.latest
        said = (
            line for message in run.warnings().values() for line in cut_lines(message, self.cells, LINES_OF_WARNING)
        )
        warnings = [Text(line, "bold yellow") for line in said]
        if warnings:
            yield PanelRow("WARNING", warnings[:WARNINGS])
        if run.is_starting:
            for service, words in run.last_words.items():
                yield PanelRow(service, [Text(cut(words, self.cells))])
            yield self._waiting()
            return
        staleness = [(name, number(latest.get(f"staleness/{key}"), digits)) for name, key, digits in STALENESS]
        yield self._row("policy", 2, ("version", str(status.get("version", MISSING))), *staleness)
        servers = status.get("servers") or []
        versions = ", ".join(str(server.get("version", MISSING)) for server in servers)
        grids = {str(server["quantization"]) for server in servers if server.get("quantization")}
        weights = [("weights", ", ".join(sorted(grids)))] if grids else []
        connected = self._row("servers", 1, (f"{len(servers)} at version", versions), *weights)
        yield connected if servers else PanelRow("servers", [Text("none connected", "yellow")], rank=1)
        device = status.get("device") or {}
        if device:  # learner and server take turns
            held_by = ("held by", str(device.get("holder") or "no process"))
            yield self._row("device", 2, held_by, ("turn", str(device.get("fence"))))
        yield self._row("groups", 3, *((name, str(count)) for name, count in (status.get("groups") or {}).items()))
        seconds = run.last("step_s")
        yield self._side("learner", ("step", MISSING if seconds is None else f"{seconds:.2f} s"))
        yield self._side("rollout")
        mismatch = ("mismatch KL", number(run.last("mismatch_kl_k3"), 5))
        yield self._row("off-policy", 2, ("ESS", number(run.last("ess"))), mismatch)
        rows = [(key[5:], number(value, 0)) for key, value in latest.items() if key[:5] == "rows/" and value != 0]
        yield self._row("trajectories", 3, *rows)
        if run.notes:
            yield PanelRow("restarts", [Text(cut(run.notes[-1], self.cells), "yellow")])
        yield self._waiting()
        errors = [(kind, str(count), "red") for kind, count in (status.get("errors") or {}).items()]
        yield self._row("errors", 0, *errors) if errors else PanelRow("errors", [Text("none", "dim")])

    def _side(self, side: str, *more: Fact) -> PanelRow:
        """Speed of one side. Servers that wait are no fault: `max_staleness` holds them, or the learner is slower."""
        idle = self.run.last(f"idle/{side}")
        starves = side == "learner" and idle is not None and idle > THRESHOLDS["LearnerStarves"].value
        speed = ("tokens/s", number(self.run.last(f"tokens_per_s/{side}"), 0))
        waits = ("idle", MISSING if idle is None else f"{idle:.0%}", "yellow" if starves else "")
        return self._row(side, 1, speed, waits, *more)

    def _waiting(self) -> PanelRow:
        """Row with what the learner waits for, always one line: the panel should not jump while it is read."""
        why = cut(self.run.waiting_for, self.cells)
        if self.run.has_ended:
            return PanelRow("ended", [Text(why, "red") if why else Text(self.run.phase, "dim")])
        return PanelRow("waiting for", [Text(why, "yellow") if why else Text("nothing", "dim")])

    def samples(self) -> Iterator[PanelRow]:
        previous: Text | None = None
        for name, style, sample in (("good", "green", self.run.good), ("bad", "red", self.run.bad)):
            if not sample:
                continue
            prompt = self._prompt(sample)
            if prompt != previous:
                yield PanelRow("prompt", [prompt])
                previous = prompt
            completion = sample["completion"]
            text = cut_lines(completion.get("text", MISSING), self.cells, self.sample_lines)
            lines = [Text(line, style) for line in text if line] or [Text("(empty)", style)]
            yield PanelRow(f"{name} {number(completion['reward'], 2)}", lines)
        if previous is None:
            yield PanelRow("nothing yet", [Text("")])

    def _prompt(self, sample: dict[str, Any]) -> Text:
        """The prompt, cut to leave room for the answer."""
        answer = cut(sample.get("answer", MISSING), self.cells // 3)
        step = f"  step {sample.get('step', MISSING)}"
        room = self.cells - cell_len(answer) - len("  answer ") - len(step)
        prompt = cut(sample.get("prompt", MISSING), max(room, 1))
        return Text.assemble(prompt, ("  answer ", "dim"), answer, (step, "dim"))


def phase_style(phase: str) -> str:
    return PHASE_STYLES.get(phase, "yellow")
