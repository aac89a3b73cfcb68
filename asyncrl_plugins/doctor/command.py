"""`asyncrl doctor [CONFIG] [--plan TARGET]`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.processing.lean_imports import uncollected


def run(arguments: Namespace) -> int:
    """Print the findings, or with --plan the memory table. Returns the exit code."""
    first, *rest = arguments.overrides or [""]
    if arguments.plan:
        from asyncrl_plugins.doctor.table import print_memory_table

        return print_memory_table(Path(arguments.plan), arguments.overrides)
    if "=" in first:
        raise UserError(
            "expected: asyncrl doctor [CONFIG [key=value ...]], or asyncrl doctor --plan TARGET [key=value ...]"
        )
    with uncollected():
        from asyncrl_plugins.doctor.examine import examine

        return examine(Path(first) if first else None, rest, quick=arguments.quick, as_json=arguments.json)
