"""Description of the command `asyncrl sft`."""

from __future__ import annotations

from asyncrl.plugins import Command

COMMAND = Command(
    help="supervised warm start on data.target_key", run="asyncrl_plugins.sft.command:run", takes_config=True
)
