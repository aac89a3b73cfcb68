"""Descriptions of the commands `inspect`, `report` and `watch`, of the panel of `asyncrl train`, and of the index."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from asyncrl.plugins import Command, Part


def _add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: RUN/report.html; of several: report.html"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto, and no page")


def _add_watch_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN")


INSPECT = Command(
    help="look at any sample of a run", run="asyncrl_plugins.viewer.command:run_inspect", parses_words=True
)
REPORT = Command(
    help="write an HTML page about a run, or about several side by side",
    run="asyncrl_plugins.viewer.command:run_report",
    add_arguments=_add_report_arguments,
)
WATCH = Command(
    help="live panel of a run, wherever it was started",
    run="asyncrl_plugins.viewer.command:run_watch",
    add_arguments=_add_watch_arguments,
)
PANEL = Part(implementation="asyncrl_plugins.viewer.panel.display:open_panel")
INDEX = Part(implementation="asyncrl_plugins.viewer.samples.sample_index:SampleIndex")
