"""Descriptions of the options of `asyncrl export`."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from asyncrl.plugins import Option


class WithoutTarget(Action):
    """Store the option's value. TARGET, which the command asks for otherwise, may be left out beside it."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: object = None) -> None:
        setattr(namespace, self.dest, values)
        for argument in parser._actions:
            if argument.dest == "target":
                argument.required = False


PUSH = Option(
    command="export",
    flag="--push",
    run="asyncrl_plugins.hub.command:push",
    settings={
        "action": WithoutTarget,
        "metavar": "ORG/NAME",
        "help": "send the export, with a model card made from the run, to this repository of the hub (HF_ENDPOINT, "
        "HF_TOKEN); of a finished run without TARGET its export/",
    },
)
CARD = Option(
    command="export",
    flag="--card",
    run="asyncrl_plugins.hub.command:write_card",
    settings={
        "action": WithoutTarget,
        "type": Path,
        "metavar": "FILE",
        "help": "write the model card, without TARGET it alone; with --push the file of a card that is sent as it is",
    },
)
PRIVATE = Option(
    command="export",
    flag="--private",
    run="asyncrl_plugins.hub.command:check_private",
    settings={"action": "store_true", "help": "with --push: a repository that is made is private"},
)
