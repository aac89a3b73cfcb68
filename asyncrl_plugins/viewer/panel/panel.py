"""One panel, three questions: is it learning, is the pipeline healthy, what does it write.

Every row is made of lines of known width, so the panel knows its height and leaves out what a small terminal has no
room for, the least important first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.box import ROUNDED
from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.text import Text

from asyncrl_plugins.viewer.panel.answers import Answers, PanelRow, phase_style
from asyncrl_plugins.viewer.panel.formatting import cut
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot

NAME_CELLS = 12
GAP = 2
NARROW = 70
TALL = 40
SAMPLE_LINES = 3
"""Lines of a completion in a tall terminal."""


@dataclass(frozen=True)
class RunPanel:
    """A run so far, as large as the console lets it be."""

    run: RunSnapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        padding = 1 if options.max_width < NARROW else 2
        height = console.size.height
        room = options.max_width - 2 * padding - 2
        names = min(NAME_CELLS, room // 3)
        view = Answers(self.run, room - names - GAP, SAMPLE_LINES if height >= TALL else 1)
        sections = [
            ("Is it learning?", list(view.learning())),
            ("Is the pipeline healthy?", list(view.pipeline())),
            ("What does it write?", list(view.samples())),
        ]
        borders_and_progress = 3
        gaps = len(sections) + 2
        spare = height - borders_and_progress - sum(_height(rows) for _, rows in sections)
        parts: list[RenderableType] = [view.progress()]
        if self.run.method and spare > 0:
            parts, spare = [Text(cut(self.run.method, room), "dim", no_wrap=True), *parts], spare - 1
        for question, rows in sections if spare >= 0 else _fitting(sections, height - borders_and_progress):
            heading = Text(question, "bold cyan", no_wrap=True)
            parts += [*([Text("")] if spare >= gaps else []), heading, _block(rows, names)]
        phase = self.run.phase
        yield Panel(
            Group(*parts),
            box=ROUNDED,
            title=Text.assemble(
                ("asyncrl", "bold"), f"  {cut(self.run.run_dir, room // 2)}  ", (phase, phase_style(phase))
            ),
            title_align="left",
            border_style="dim",
            padding=(1 if spare >= gaps else 0, padding),
        )


def _height(rows: list[PanelRow]) -> int:
    """Lines of a section, with its question."""
    return 1 + sum(len(row.lines) for row in rows)


def _fitting(sections: list[tuple[str, list[PanelRow]]], height: int) -> list[tuple[str, list[PanelRow]]]:
    """Sections without second lines, then without rows of the highest rank, the last of them first, until they fit."""
    sections = [(question, [replace(row, lines=row.lines[:1]) for row in rows]) for question, rows in sections]
    while sum(_height(rows) for _, rows in sections) > height:
        ranked = [(row.rank, place, rows) for _, rows in sections for place, row in enumerate(rows) if row.rank]
        if not ranked:
            break
        rank = max(rank for rank, _, _ in ranked)
        _, place, rows = [candidate for candidate in ranked if candidate[0] == rank][-1]
        del rows[place]
    return sections


def _block(rows: list[PanelRow], cells: int) -> Text:
    """Names and lines in one text, which is drawn in a fraction of the time of a table with a cell for each."""
    lines = []
    for row in rows:
        for place, line in enumerate(row.lines):
            name = set_cell_size("" if place else cut(row.name, cells), cells + GAP)
            lines.append(Text.assemble((name, "dim"), line))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)
