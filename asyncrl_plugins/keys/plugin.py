"""Description of the command `asyncrl keys`."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from asyncrl.plugins import Command


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="becomes network.keys_dir")
    parser.add_argument("--server", metavar="NAME", help="only one more server's pair, which can be withdrawn alone")


COMMAND = Command(
    help="make key pairs for learner and rollout servers on several machines",
    run="asyncrl_plugins.keys.command:run",
    add_arguments=add_arguments,
)
"""Key pairs, made where no key of that name is."""
