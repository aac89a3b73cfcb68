"""`asyncrl doctor [CONFIG] [--plan TARGET]`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.processing.lean_imports import uncollected


def run(arguments: Namespace) -> int:
    """Print the findings, or with --plan the memory table. Returns the exit code."""
    plan, words = arguments.plan, list(arguments.overrides)
    if plan:  # the target stands behind --plan, or is the first of the other words
        words.insert(len(words) if "=" in plan else 0, plan)
    target, *changes = words or [""]
    if "=" in target or (plan is not None and not target):
        raise UserError(
            "expected: asyncrl doctor [CONFIG [key=value ...]], or asyncrl doctor --plan TARGET [key=value ...]"
        )
    if plan is not None:
        from asyncrl_plugins.doctor.table import print_memory_table

        return print_memory_table(Path(target), changes)
    with uncollected():
        from asyncrl_plugins.doctor.examine import examine

        return examine(Path(target) if target else None, changes, quick=arguments.quick, as_json=arguments.json)
