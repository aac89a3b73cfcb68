"""Description of the command `asyncrl doctor`."""

from __future__ import annotations

from argparse import ArgumentParser

from asyncrl.plugins import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="CONFIG key=value", help="check this configuration, too")
    help = "memory table of a configuration or model folder, no weights, before or behind its name"
    parser.add_argument("--plan", nargs="?", const="", metavar="TARGET", help=help)
    parser.add_argument("--quick", action="store_true", help="everything but the trial, a real run of two tiny steps")
    parser.add_argument("--json", action="store_true", help="for scripts; the exit code is 1 if there is a problem")


COMMAND = Command(
    help="what this machine has, what is wrong with it, and what a run will need",
    run="asyncrl_plugins.doctor.command:run",
    add_arguments=_add_arguments,
)
