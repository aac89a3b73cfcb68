"""One panel, three questions: is it learning, is the pipeline healthy, what does it write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import ROUNDED
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.launch.story import Story

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 32
MISSING = "-"
PHASE_STYLES = {"training": "green", "evaluating": "cyan", "finished": "bold green", "failed": "bold red"}
Fact = tuple[str, str] | tuple[str, str, str]
"""Name, value and, where it stands out, the value's style."""


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """The whole course in `width` characters: means of equal slices, from lowest to highest bar."""
    means = _slice_means(values, width)
    if not means:
        return ""
    low, span = min(means), max(max(means) - min(means), 1e-9)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def _slice_means(values: Sequence[float], width: int) -> list[float]:
    width = min(width, len(values))
    slices = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return [sum(part) / len(part) for part in slices]


def number(value: Any, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:z.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def render(story: Story, *, compact: bool = False) -> RenderableType:
    """The panel of the story so far; `compact` leaves out blank lines, for terminals of 24."""
    phase = str(story.status.get("phase", "starting"))
    style = PHASE_STYLES.get(phase, "yellow")
    gap = [] if compact else [Text("")]
    parts: list[RenderableType] = [_progress(story, style)]
    for question, rows in (
        ("Is it learning?", _learning(story)),
        ("Is the pipeline healthy?", _pipeline(story)),
        ("What does it write?", _samples(story)),
    ):
        parts += [*gap, Text(question, style="bold cyan"), _table(rows)]
    return Panel(
        Group(*parts),
        box=ROUNDED,
        title=Text.assemble(("asyncrl", "bold"), f"  {_short(story.run_dir, 50)}  ", (phase, style)),
        title_align="left",
        border_style="dim",
        padding=(0 if compact else 1, 2),
    )


def _progress(story: Story, style: str) -> RenderableType:
    total = story.status.get("total_steps")
    step = story.latest.get("step", story.status.get("step", 0))
    if not total:
        return Text(f"step {step}")
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=total, completed=step, style="bright_black", complete_style=style, finished_style=style)
    left = story.seconds_left()
    row.add_row(Text(f"step {step} of {total}", style="bold"), bar, Text(duration(left) + " left" if left else ""))
    return row


def _table(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=14, no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _facts(*facts: Fact) -> RenderableType:
    """Names in grey, values beside them; a narrow terminal breaks the line between facts, never inside one."""
    shown = [Text.assemble((f"{name} ", "dim"), (value, "".join(style))) for name, value, *style in facts]
    return Columns(shown, padding=(0, 3, 0, 0)) if shown else Text(MISSING, style="dim")


def _learning(story: Story) -> list[tuple[str, RenderableType]]:
    rewards = [step["reward/mean"] for step in story.steps if step.get("reward/mean") is not None]
    means = _slice_means(rewards, SPARKLINE_WIDTH)
    curve = Text.assemble((number(story.last("reward/mean")), "bold"), "  ", (sparkline(rewards), "green"))
    if len(means) > 1:
        curve.append(f"  {min(means):.2f} to {max(means):.2f}", "dim")
    parts = [
        (key.removeprefix("reward/"), number(value))
        for key, value in story.latest.items()
        if key.startswith("reward/") and key not in ("reward/mean", "reward/std")
    ]
    learning_rate = story.last("lr")
    return [
        ("reward", curve),
        *([("components", _facts(*parts))] if parts else []),
        ("held-out", _held_out(story)),
        (
            "optimisation",
            _facts(
                ("loss", number(story.last("loss"), 4)),
                ("grad norm", number(story.last("grad_norm"), 2)),
                ("entropy", number(story.last("entropy"))),
                ("lr", MISSING if learning_rate is None else f"{learning_rate:.2g}"),
            ),
        ),
    ]


def _held_out(story: Story) -> Text:
    """Accuracy of the first evaluation and of the latest."""
    if not story.evaluations:
        return Text("not evaluated yet", style="dim")
    first, last = story.evaluations[0], story.evaluations[-1]
    before, after = first.get("accuracy"), last.get("accuracy")
    shown = Text.assemble("accuracy " if last is first else "", (number(before), "bold" if last is first else ""))
    if last is first:
        return shown.append(f"  at step {first.get('step', MISSING)}", "dim")
    style = "" if before is None or after is None or before == after else "green" if after > before else "red"
    steps = f"  accuracy at steps {first.get('step', MISSING)} and {last.get('step', MISSING)}"
    return shown.append(" → ").append(number(after), f"bold {style}".strip()).append(steps, "dim")


def _pipeline(story: Story) -> list[tuple[str, RenderableType]]:
    status, latest = story.status, story.latest
    servers = status.get("servers") or []
    behind = ", ".join(str(server.get("version", MISSING)) for server in servers)
    groups = [(name, str(count)) for name, count in (status.get("groups") or {}).items()]
    rows = [(key.removeprefix("rows/"), value) for key, value in latest.items() if key.startswith("rows/")]
    errors = [(kind, str(count), "red") for kind, count in (status.get("errors") or {}).items()]
    # One line whatever its length: the panel should not jump while it is being read.
    waiting = Text(str(status.get("waiting_for") or ""), style="yellow", no_wrap=True, overflow="ellipsis")
    return [
        (
            "policy",
            _facts(
                ("version", str(status.get("version", MISSING))),
                ("staleness mean", number(latest.get("staleness/mean"), 2)),
                ("max", number(latest.get("staleness/max"), 0)),
            ),
        ),
        (
            "servers",
            _facts((f"{len(servers)} at version", behind)) if servers else Text("none connected", style="yellow"),
        ),
        *_device(story),
        ("groups", _facts(*groups)),
        ("learner", _side(story, "learner")),
        ("rollout", _side(story, "rollout")),
        (
            "off-policy",
            _facts(("ESS", number(story.last("ess"))), ("mismatch KL", number(story.last("mismatch_kl_k3"), 5))),
        ),
        ("trajectories", _facts(*((name, number(value, 0)) for name, value in rows if value != 0))),
        *([("restarts", Text(story.notes[-1], "yellow", no_wrap=True, overflow="ellipsis"))] if story.notes else []),
        ("waiting for", waiting or Text("nothing" if status else "the first word of the learner", style="dim")),
        ("errors", _facts(*errors) if errors else Text("none", style="dim")),
    ]


def _device(story: Story) -> list[tuple[str, RenderableType]]:
    """Who has it, where learner and server take turns."""
    device = story.status.get("device") or {}
    if not device:
        return []
    return [("device", _facts(("held by", str(device.get("holder") or "nobody")), ("turn", str(device.get("fence")))))]


def _side(story: Story, side: str) -> RenderableType:
    idle = story.last(f"idle/{side}")
    share = MISSING if idle is None else f"{idle:.0%}"
    return _facts(
        ("tokens/s", number(story.last(f"tokens_per_s/{side}"), 0)),
        ("idle", share, "yellow" if idle is not None and idle > 0.5 else ""),
    )


def _samples(story: Story) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    previous: tuple[str, str] | None = None
    for name, style, sample in (("good", "green", story.good), ("bad", "red", story.bad)):
        if not sample:
            continue
        question = (_short(sample.get("prompt", MISSING)), _short(sample.get("answer", MISSING), 40))
        if question != previous:
            step = sample.get("step", MISSING)
            rows.append(
                ("prompt", Text.assemble(question[0], ("  answer ", "dim"), question[1], (f"  step {step}", "dim")))
            )
            previous = question
        completion = sample["completion"]
        text = _short(completion.get("text", MISSING)) or "(empty)"
        rows.append((f"{name} {number(completion['reward'], 2)}", Text(text, style)))
    return rows or [("nothing yet", Text(""))]


def _short(text: Any, limit: int = 90) -> str:
    """One line. Control characters are shown, not sent: a model may write escape sequences to your terminal."""
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
