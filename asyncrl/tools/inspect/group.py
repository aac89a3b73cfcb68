"""One group, in full: prompt, images, and each completion with its tokens coloured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from rich.console import Console, ConsoleRenderable
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from asyncrl.tools.inspect.listing import MISSING, difference_text, number, reward_text, status_text
from asyncrl.tools.inspect.pictures import half_blocks, image_facts
from asyncrl.tools.inspect.records import consumed_at, levels_of
from asyncrl.tools.inspect.text import visible
from asyncrl.tools.pages.token_levels import (
    DIFFERENCES,
    LEGENDS,
    LESS,
    MASKED,
    MORE,
    TITLES,
    UNKNOWN,
    UNSAMPLED,
    Colouring,
)
from asyncrl.tools.samples import SampleDetail, SampleImage, SampleRow, TrajectoryDetail

PICTURE_COLUMNS, PICTURE_LINES = 64, 24


def _graded(levels: str, colour: str) -> dict[str, str]:
    styles = (colour, f"bold {colour}", f"#000000 on {colour}", f"bold underline #ffffff on {colour}")
    return dict(zip(levels, styles, strict=True))


STYLES: dict[Colouring, dict[str, str]] = {
    "diff": _graded(LESS, "red") | _graded(MORE, "blue") | {UNSAMPLED: "dim italic", UNKNOWN: "dim"},
    "version": _graded("1234", "yellow") | {UNSAMPLED: "dim italic"},
    "mask": {UNSAMPLED: "dim italic", MASKED: "strike red"},
    "logprob": _graded("1234", "magenta") | {UNSAMPLED: "dim italic"},
}
LARGEST = 3
"""Differences that are listed."""


def print_group(console: Console, detail: SampleDetail, colouring: Colouring) -> None:
    """Outside a terminal each value stands on a line of its own, however long."""
    for part in _heading(detail, console):
        console.print(part, soft_wrap=not console.is_terminal)
    if detail.problem:
        console.print(Text(detail.problem, "yellow"), soft_wrap=not console.is_terminal)
    for row, trajectory in zip(detail.rows, detail.trajectories, strict=True):
        title = _title(row, trajectory)
        parts = _completion(row, trajectory, colouring, console.color_system is not None)
        if console.is_terminal:
            console.print(Rule(style="dim"), title, *(Padding(p, (0, 0, 0, 2)) for p in parts))
        else:
            console.print(Text(""), title, *parts, sep="\n", soft_wrap=True)
    console.print(
        Text(""), _legend(colouring, console.color_system is not None), sep="\n", soft_wrap=not console.is_terminal
    )


def _heading(detail: SampleDetail, console: Console) -> Iterator[ConsoleRenderable]:
    first = detail.rows[0]
    step = "not trained on yet" if first.step is None else f"step {first.step}"
    yield Text.assemble((f"ticket {first.ticket_id}", "bold"), f"   {step}   ", (visible(first.row_id), "dim"))
    for image in detail.images:
        yield Text("")
        yield _picture(image, console)
    yield Text("")
    for message in detail.messages:
        yield Text.assemble((f"{visible(message['role'])}  ", "dim"), visible(message["content"], lines=True))
    yield Text.assemble(("answer  ", "dim"), (visible(detail.answer, lines=True) or MISSING, "bold"))


def _picture(image: SampleImage, console: Console) -> Text:
    facts = image_facts(image)
    about = Text(f"{facts.width} × {facts.height} {facts.format}, {facts.bytes:,} bytes, {facts.hash}", "dim")
    if facts.problem:
        return Text(f"{facts.problem} ({facts.hash})", "yellow")
    if console.color_system not in ("256", "truecolor"):
        return about
    shown = half_blocks(image, min(PICTURE_COLUMNS, console.width - 4), PICTURE_LINES)
    return about if shown is None else Text("\n").join([shown, about])


def _title(row: SampleRow, trajectory: TrajectoryDetail) -> Text:
    parts = [
        Text.assemble((f"{row.ticket_id}.{row.trajectory}", "bold")),
        Text.assemble("reward ", reward_text(row)),
        *(Text(f"{visible(name)} {number(value)}", "dim") for name, value in trajectory.rewards.items()),
        *([Text(f"advantage {number(trajectory.advantage)}")] if trajectory.advantage is not None else []),
        status_text(row.status),
        Text(f"{row.length} tokens"),
        Text(f"staleness {row.staleness}"),
        Text.assemble("Δ max ", difference_text(row.logprob_diff_max)),
    ]
    return Text("   ").join(parts)


def _completion(
    row: SampleRow, trajectory: TrajectoryDetail, colouring: Colouring, colours: bool
) -> Iterator[ConsoleRenderable]:
    if trajectory.error:
        yield Text(visible(trajectory.error, lines=True), "red")
    levels = levels_of(row, trajectory)
    text = Text(overflow="fold")
    for token, level in zip(trajectory.tokens, levels[colouring], strict=True):
        text.append(visible(token, lines=True), STYLES[colouring].get(level, ""))
    nothing = "(its tokens are not kept any more)" if row.length else "(empty)"
    yield text if trajectory.tokens else Text(nothing, "dim")
    if not trajectory.tokens:
        return
    if not colours:
        yield Text(f"{colouring}  {levels[colouring]}")
    if colouring == "version":
        yield Text(
            f"versions {_stretches(trajectory.versions.tolist())}, consumed at {consumed_at(row, trajectory)}", "dim"
        )
    if colouring == "diff":
        yield from _largest(trajectory)


def _stretches(versions: list[int]) -> str:
    """`3 (tokens 1 to 40), 4 (tokens 41 to 64)`."""
    starts = [0, *(i + 1 for i, (before, after) in enumerate(pairwise(versions)) if before != after), len(versions)]
    return ", ".join(f"{versions[start]} (tokens {start + 1} to {end})" for start, end in pairwise(starts))


def _largest(trajectory: TrajectoryDetail) -> Iterator[Text]:
    learner, engine = trajectory.learner_logprobs, trajectory.logprobs
    if learner is None:
        yield Text("the learner's log-probs of this group are not known", "dim")
        return
    gaps = np.nan_to_num(learner - engine, nan=0.0)
    for i in np.argsort(-abs(gaps), kind="stable")[:LARGEST]:
        if abs(gaps[i]) >= DIFFERENCES[0]:
            yield Text(
                f"token {i + 1} {visible(trajectory.tokens[i])!r}  engine {engine[i]:.4f}  learner {learner[i]:.4f}  "
                f"difference {gaps[i]:+.4f}",
                "dim",
            )


def _legend(colouring: Colouring, colours: bool) -> Text:
    entries = [
        Text.assemble(("" if colours else f"{level} ", "dim"), (meaning, STYLES[colouring].get(level, "")))
        for level, meaning in LEGENDS[colouring]
    ]
    return Text.assemble((f"{TITLES[colouring]}:  ", "dim"), Text("   ").join(entries))
