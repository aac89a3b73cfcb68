"""The panel as an output of a notebook's cell, drawn anew in its place."""

from __future__ import annotations

import io
import sys
from typing import Any

from rich.console import RenderableType

from asyncrl_plugins.viewer.panel.console import Console

WIDTH, HEIGHT = 100, 40
"""Characters and lines of the panel in a cell."""
CELL = '<pre style="font-family:monospace;line-height:1.2;overflow-x:auto"><code>{code}</code></pre>'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose cells show HTML."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class NotebookPanel:
    """Has the methods of rich's Live that a display calls."""

    def __init__(self, panel: RenderableType) -> None:
        self._panel = panel
        self._cell: Any = None

    def start(self) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._cell = display(self._drawn(), display_id=True)

    def refresh(self) -> None:
        self._cell.update(self._drawn())

    def stop(self) -> None:
        self.refresh()

    def _drawn(self) -> Any:
        from IPython.display import HTML  # pyright: ignore[reportMissingImports]

        console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True)
        console.print(self._panel)
        return HTML(console.export_html(inline_styles=True, code_format=CELL))
