"""Draw the panel of a run, as a terminal of 100 columns shows it, into docs/images/panel.svg.

    python scripts/make_panel_picture.py RUN [--out FILE.svg]

A run that goes on has more to show than one that is finished.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from asyncrl_plugins.viewer.panel.panel import RunPanel
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot

FILE = Path(__file__).parent.parent / "docs" / "images" / "panel.svg"
WIDTH, HEIGHT = 100, 32


def panel_picture(run_dir: Path) -> str:
    """The panel as SVG."""
    run = RunSnapshot(run_dir)
    run.refresh()
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(RunPanel(run))
    svg = console.export_svg(title="asyncrl train", theme=MONOKAI, unique_id="panel")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(panel_picture(arguments.run), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
