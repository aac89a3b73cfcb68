"""The command `asyncrl compose`."""

from __future__ import annotations

import argparse

from asyncrl.errors import UserError
from asyncrl_plugins.compose.settings import load_composition


def run(arguments: argparse.Namespace) -> int:
    parts = load_composition(arguments.parts)
    if arguments.target.exists():
        raise UserError(f"{arguments.target} exists already. Name a new folder")
    from asyncrl_plugins.compose.composition import compose  # torch, once the settings are right

    print(compose(parts, arguments.target))
    return 0
