"""Samples in the terminal: a list of many, a line each; or one group in full, with its tokens coloured."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from asyncrl_plugins.viewer.inspect.pictures import half_blocks, image_facts
from asyncrl_plugins.viewer.inspect.token_levels import (
    DIFFERENCES,
    LEGENDS,
    LESS,
    MASKED,
    MORE,
    TITLES,
    UNKNOWN,
    UNSAMPLED,
    Colouring,
    telling_colouring,
    token_levels,
)
from asyncrl_plugins.viewer.samples.model import (
    Page,
    SampleDetail,
    SampleImage,
    SampleQuery,
    SampleRow,
    SampleTurn,
    ShownMessage,
    TrajectoryDetail,
)
from protocol.messages import TrajectoryStatus

MISSING = "-"
STATUS_STYLES: dict[str, str] = {
    TrajectoryStatus.TRUNCATED: "yellow",
    TrajectoryStatus.TIMED_OUT: "red",
    TrajectoryStatus.ERROR: "bold red",
}
ORIGIN_STYLE = "cyan"
LARGE_DIFFERENCE = 0.5
"""A log-prob difference, in nats, that is worth a second look."""
NUM_LARGEST = 3
"""Number of the largest differences that are listed below a completion."""
PICTURE_COLUMNS, PICTURE_LINES = 64, 24


def _graded(levels: str, colour: str) -> dict[str, str]:
    styles = (colour, f"bold {colour}", f"#000000 on {colour}", f"bold underline #ffffff on {colour}")
    return dict(zip(levels, styles, strict=True))


TOKEN_STYLES: dict[Colouring, dict[str, str]] = {
    "diff": _graded(LESS, "red") | _graded(MORE, "blue") | {UNSAMPLED: "dim italic", UNKNOWN: "dim"},
    "version": _graded("1234", "yellow") | {UNSAMPLED: "dim italic"},
    "mask": {UNSAMPLED: "dim italic", MASKED: "strike red"},
    "logprob": _graded("1234", "magenta") | {UNSAMPLED: "dim italic"},
}


# --- text that a model or a data set wrote ---------------------------------------------------------


def visible(text: str, *, lines: bool = False) -> str:
    """Show control, formatting and private characters as codes: text may hold escape sequences to a terminal.

    With `lines`, a line break is shown and made as well.
    """
    codes = {"\n": "↵\n" if lines else "↵", "\t": "→"}
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs"  # a space of any script
        else codes.get(c) or c.encode("unicode_escape").decode()
        for c in text
    )  # fmt: skip


def one_line(text: str, limit: int) -> str:
    """Shorten to at most `limit` characters, with white space as single spaces."""
    line = visible(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:z.{digits}f}"


def _reward(row: SampleRow) -> Text:
    """Colour by the advantage: green is made more likely, red less."""
    advantage = row.advantage or 0.0
    style = "dim" if row.reward is None else "green" if advantage > 0 else "red" if advantage < 0 else ""
    return Text(_number(row.reward), style)


def _difference(value: float | None) -> Text:
    return Text(_number(value, 3), "yellow" if value is not None and value > LARGE_DIFFERENCE else "")


def _status(status: str) -> Text:
    return Text(visible(status), STATUS_STYLES.get(status, ""))


# --- a list ----------------------------------------------------------------------------------------


def print_listing(console: Console, page: Page, offset: int, query: SampleQuery) -> None:
    console.print(_table(page.rows, console.width))
    last = offset + len(page.rows)
    hints = ["--web shows them in a browser"]
    if page.rows:
        line = f"{offset + 1:,} to {last:,} of {page.total:,} samples"
        next_ones = [f"--offset {last} the next ones"] if last < page.total else []
        hints = ["--ticket ID shows one group", *next_ones, *hints]
    elif page.total:
        line = f"no sample from --offset {offset} on: {page.total:,} match"
    else:
        line = "there is no sample" if query == SampleQuery(order=query.order) else "no sample matches these filters"
    console.print(Text.assemble(line, (f"   {', '.join(hints)}", "dim")))


def _table(rows: Sequence[SampleRow], width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="dim", expand=True)
    for name in ("step", "ticket", "reward", "tokens", "stale", "Δ max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("prompt", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("completion", ratio=3, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(
            str(row.step),
            f"{row.ticket_id}.{row.trajectory}",
            _reward(row),
            str(row.length),
            str(row.staleness),
            _difference(row.logprob_diff_max),
            _status(row.status),
            Text(one_line(row.prompt, width)),
            Text.assemble((f"{row.origin}  " * bool(row.origin), ORIGIN_STYLE), _wrote(row, width)),
        )
    return table


def _wrote(row: SampleRow, width: int) -> Text:
    return Text(one_line(row.error, width), "red") if row.error else Text(one_line(row.completion, width))


# --- a group in full -------------------------------------------------------------------------------


def print_group(console: Console, detail: SampleDetail, colouring: Colouring | None) -> None:
    """Print a group, without a colouring in the one that tells most about it."""
    levels = [token_levels(trajectory) for trajectory in detail.trajectories]
    colouring = colouring or telling_colouring(levels)
    console.print(*_heading(detail, console), sep="\n")
    if detail.problem:
        console.print(Text(detail.problem, "yellow"))
    for trajectory, its_levels in zip(detail.trajectories, levels, strict=True):
        lines = _completion(trajectory, colouring, its_levels[colouring], console)
        parts = (Padding(part, (0, 0, 0, 2)) for part in lines)
        console.print(Rule(style="dim"), _title(trajectory), *parts)
    entries = [Text(meaning, TOKEN_STYLES[colouring].get(level, "")) for level, meaning in LEGENDS[colouring]]
    console.print(Text(""), Text.assemble((f"{TITLES[colouring]}:  ", "dim"), Text("   ").join(entries)), sep="\n")


def _heading(detail: SampleDetail, console: Console) -> Iterator[Text]:
    row_id = visible(detail.trajectories[0].row.row_id)
    sampled_by = f"   sampled with {visible(detail.quantization)} weights" if detail.quantization else ""
    yield Text.assemble(
        (f"ticket {detail.ticket_id}", "bold"), f"   step {detail.step}   ", (row_id, "dim"), sampled_by
    )
    for image in detail.images:
        yield Text("")
        yield _picture(image, console)
    yield Text("")
    for message in detail.messages:
        yield Text.assemble((f"{visible(message['role'])}  ", "dim"), visible(message["content"], lines=True))
    yield from _shown(detail.opening, console)
    yield Text.assemble(("answer  ", "dim"), (visible(detail.answer, lines=True) or MISSING, "bold"))


def _picture(image: SampleImage, console: Console) -> Text:
    facts = image_facts(image)
    if facts.problem:
        return Text(f"{facts.problem} ({facts.hash})", "yellow")
    about = Text(f"{facts.width} × {facts.height} {facts.format}, {facts.bytes:,} bytes, {facts.hash}", "dim")
    if console.color_system not in ("256", "truecolor"):
        return about
    drawn = half_blocks(image, min(PICTURE_COLUMNS, console.width - 4), PICTURE_LINES)
    return about if drawn is None else Text("\n").join([drawn, about])


def _title(trajectory: TrajectoryDetail) -> Text:
    row = trajectory.row
    parts = [
        Text(f"{row.ticket_id}.{row.trajectory}", "bold"),
        Text.assemble("reward ", _reward(row)),
        *(Text(f"{visible(name)} {_number(value)}", "dim") for name, value in trajectory.rewards.items()),
        *([Text(f"advantage {_number(row.advantage)}")] if row.advantage is not None else []),
        *([Text(row.origin, ORIGIN_STYLE)] if row.origin else []),
        _status(row.status),
        Text(f"{row.length} tokens"),
        Text(f"staleness {row.staleness}"),
        Text.assemble("Δ max ", _difference(row.logprob_diff_max)),
    ]
    return Text("   ").join(parts)


def _completion(trajectory: TrajectoryDetail, colouring: Colouring, levels: str, console: Console) -> Iterator[Text]:
    if trajectory.row.error:
        yield Text(visible(trajectory.row.error, lines=True), "red")
    if not trajectory.tokens:
        yield Text("(its tokens are no longer kept)" if trajectory.row.length else "(empty)", "dim")
        return
    for number, turn in enumerate(trajectory.turns):
        if turn.context:
            shown_again = f"   {turn.context} tokens of history, as it is shown from here on"
            yield Text.assemble(("new segment", "bold yellow"), (shown_again, "dim"))
            yield _coloured(trajectory, colouring, levels, slice(turn.start - turn.context, turn.start))
        versions = "-".join(map(str, sorted({*trajectory.versions[[turn.start, turn.end - 1]].tolist()})))
        facts = f"   reward {_number(turn.reward)}   version {versions}   {turn.finish_reason}"
        yield Text.assemble((f"turn {number}", "bold"), (facts, "dim"))
        yield _coloured(trajectory, colouring, levels, slice(turn.start, turn.end))
        yield from _calls(turn)
        yield from _shown(turn.shown, console)
    if not trajectory.turns:
        yield _coloured(trajectory, colouring, levels, slice(None))
    elif trajectory.limit:
        yield Text(f"ended by environment.limits.{trajectory.limit}", "yellow")
    if colouring == "version":
        yield Text(f"versions {_stretches(trajectory.versions)}, consumed at {trajectory.consumed_at}", "dim")
    if colouring == "diff":
        yield from _largest_differences(trajectory)


def _calls(turn: SampleTurn) -> Iterator[Text]:
    """Calls of the turn with their results, and the environment's facts."""
    for call in turn.calls:
        what = Text.assemble(("call  ", "dim"), (visible(call.name) or MISSING, "bold"), f" {visible(call.arguments)}")
        ended = f"{call.error_kind}: {visible(call.error)}" if call.error_kind else "ok"
        took = f"   {call.seconds:.2f} s" if call.seconds else ""
        yield what.append(f"   {ended}{took}", "red" if call.error_kind else "dim")
    if turn.info:
        yield Text(f"info  {visible(turn.info)}", "dim")


def _coloured(trajectory: TrajectoryDetail, colouring: Colouring, levels: str, part: slice) -> Text:
    text = Text(overflow="fold")
    for token, level in zip(trajectory.tokens[part], levels[part], strict=True):
        text.append(visible(token, lines=True), TOKEN_STYLES[colouring].get(level, ""))
    return text


def _shown(messages: Sequence[ShownMessage], console: Console) -> Iterator[Text]:
    """Observation as text, images at their places."""
    for message in messages:
        for part in message.parts:
            shown = Text(visible(part, lines=True)) if isinstance(part, str) else _picture(part, console)
            yield Text.assemble((f"{visible(message.role)}  ", "dim"), shown)


def _stretches(versions: np.ndarray) -> str:
    """`3 (tokens 1 to 40), 4 (tokens 41 to 64)`."""
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return ", ".join(f"{versions[start]} (tokens {start + 1} to {end})" for start, end in pairwise(starts))


def _largest_differences(trajectory: TrajectoryDetail) -> Iterator[Text]:
    learner, engine = trajectory.learner_logprobs, trajectory.logprobs
    if learner is None:
        yield Text("the learner's log-probs of this group are not known", "dim")
        return
    gaps = np.nan_to_num(np.where(trajectory.is_sampled, learner - engine, 0.0), nan=0.0)
    for i in np.argsort(-abs(gaps), kind="stable")[:NUM_LARGEST]:
        if abs(gaps[i]) >= DIFFERENCES[0]:
            yield Text(
                f"token {i + 1} {visible(trajectory.tokens[i])!r}  engine {engine[i]:.4f}  learner {learner[i]:.4f}  "
                f"difference {gaps[i]:+.4f}",
                "dim",
            )
