"""`asyncrl replay RUN --step N`."""

from __future__ import annotations

from argparse import Namespace
from typing import NoReturn

from asyncrl.launch.command import become


def run(arguments: Namespace) -> NoReturn:
    """Leave the process to the replay: its environment has to be set before torch is imported."""
    become("asyncrl_plugins.replay.replay", *arguments.words)
