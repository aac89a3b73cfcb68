"""Many samples, a line each: a table in a terminal, tab-separated values elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.tools.inspect.text import one_line, visible
from asyncrl.tools.samples import Page, SampleQuery, SampleRow
from protocol.messages import TrajectoryStatus

MISSING = "-"
COLUMNS = (
    "step", "ticket", "trajectory", "status", "reward", "length", "staleness", "logprob_diff_max", "row_id", "prompt",
    "completion", "error",
)  # fmt: skip
STATUS_STYLES = {
    TrajectoryStatus.TRUNCATED: "yellow",
    TrajectoryStatus.TIMED_OUT: "red",
    TrajectoryStatus.ERROR: "bold red",
}
LARGE_DIFFERENCE = 0.5
"""In nats: worth a second look."""


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:z.{digits}f}"


def print_listing(console: Console, page: Page, beginnings: Sequence[str], offset: int, query: SampleQuery) -> None:
    console.print(_table(page.rows, beginnings, console.width))
    first, last = offset + 1, offset + len(page.rows)
    nothing = nothing_here(page, offset, query)
    line = f"{first:,} to {last:,} of {page.total:,} samples" if page.rows else nothing
    hints = ["--ticket ID shows one group"] if page.rows else []
    if last < page.total and page.rows:
        hints.append(f"--offset {last} the next ones")
    hints.append("--web shows them in a browser")
    console.print(Text.assemble(line, (f"   {', '.join(hints)}", "dim")))


def nothing_here(page: Page, offset: int, query: SampleQuery) -> str:
    """Why a list is empty."""
    if page.total:
        return f"no sample from --offset {offset} on: {page.total:,} match"
    return "there is no sample" if query == SampleQuery(order=query.order) else "no sample matches these filters"


def tab_separated(rows: Sequence[SampleRow], beginnings: Sequence[str]) -> Iterator[str]:
    """A line with the columns' names, then one for each sample."""
    yield "\t".join(COLUMNS)
    for row, beginning in zip(rows, beginnings, strict=True):
        yield "\t".join(_values(row, beginning))


def _values(row: SampleRow, beginning: str) -> list[str]:
    values = (
        row.step, row.ticket_id, row.trajectory, row.status, row.reward, row.length, row.staleness,
        row.logprob_diff_max, row.row_id, row.prompt, beginning, row.error,
    )  # fmt: skip
    return [MISSING if value is None else visible(str(value)) for value in values]


def _table(rows: Sequence[SampleRow], beginnings: Sequence[str], width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="dim", expand=True)
    for name in ("step", "ticket", "reward", "tokens", "stale", "Δ max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("prompt", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("completion", ratio=3, no_wrap=True, overflow="ellipsis")
    for row, beginning in zip(rows, beginnings, strict=True):
        wrote = Text(one_line(row.error, width), "red") if row.error else Text(one_line(beginning, width))
        table.add_row(
            MISSING if row.step is None else str(row.step),
            f"{row.ticket_id}.{row.trajectory}",
            reward_text(row),
            str(row.length),
            str(row.staleness),
            difference_text(row.logprob_diff_max),
            status_text(row.status),
            Text(one_line(row.prompt, width)),
            wrote,
        )
    return table


def reward_text(row: SampleRow) -> Text:
    """Green and red are what the learner makes of it: more likely, or less."""
    advantage = row.advantage or 0.0
    style = "dim" if row.reward is None else "green" if advantage > 0 else "red" if advantage < 0 else ""
    return Text(number(row.reward), style)


def difference_text(value: float | None) -> Text:
    return Text(number(value, 3), "yellow" if value is not None and value > LARGE_DIFFERENCE else "")


def status_text(status: str) -> Text:
    return Text(visible(status), STATUS_STYLES.get(status, ""))  # pyright: ignore[reportArgumentType,reportCallIssue]
