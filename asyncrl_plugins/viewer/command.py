"""`asyncrl inspect`, `asyncrl report` and `asyncrl watch`."""

from __future__ import annotations

from argparse import Namespace
from typing import NoReturn

from asyncrl.launch.command import become


def run_inspect(arguments: Namespace) -> NoReturn:
    become("asyncrl_plugins.viewer.inspect", *arguments.words)


def run_report(arguments: Namespace) -> int:
    from asyncrl_plugins.viewer.report.reading import read_run
    from asyncrl_plugins.viewer.report.trace import write_trace
    from asyncrl_plugins.viewer.report.write import write_report

    if arguments.trace:
        write_trace([read_run(path) for path in arguments.run_dirs], arguments.trace)
        return 0
    write_report(arguments.run_dirs, arguments.output)
    return 0


def run_watch(arguments: Namespace) -> int:
    from asyncrl_plugins.viewer.panel.display import watch

    return watch(arguments.run_dir)
