"""Description of the command `asyncrl sft`."""

from __future__ import annotations

from argparse import ArgumentParser

from asyncrl.plugins import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run in run_dir from its newest checkpoint")


COMMAND = Command(
    help="supervised warm start on data.target_key",
    run="asyncrl_plugins.sft.command:run",
    add_arguments=_add_arguments,
    takes_config=True,
    section="asyncrl_plugins.sft.settings:SftConfig",
)
