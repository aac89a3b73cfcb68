"""Description of the command `asyncrl config-reference`."""

from __future__ import annotations

from asyncrl.plugins import Command

COMMAND = Command(
    help="print every configuration key as Markdown", run="asyncrl_plugins.reference.page:print_reference"
)
