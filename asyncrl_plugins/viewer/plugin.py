"""Descriptions of the commands `asyncrl inspect` and `asyncrl report`."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from asyncrl.plugins import Command


def _add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: RUN/report.html; of several: report.html"
    )


INSPECT = Command(
    help="look at any sample of a run", run="asyncrl_plugins.viewer.command:run_inspect", parses_words=True
)
REPORT = Command(
    help="write an HTML page about a run, or about several side by side",
    run="asyncrl_plugins.viewer.command:run_report",
    add_arguments=_add_report_arguments,
)
