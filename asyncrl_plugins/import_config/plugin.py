"""Description of the command `asyncrl import-config`."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from asyncrl.plugins import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FILE", help="resolved configuration, in YAML or JSON")
    parser.add_argument("-o", dest="out", type=Path, metavar="OUT", help="write OUT; without it OUT is printed")


COMMAND = Command(
    help="translate a configuration of verl, EasyR1, RLLaVA or TRL by a table of names",
    run="asyncrl_plugins.import_config.command:run",
    add_arguments=_add_arguments,
)
