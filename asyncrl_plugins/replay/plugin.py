"""Description of the command `asyncrl replay`."""

from __future__ import annotations

from asyncrl.plugins import Command

COMMAND = Command(
    help="make a learner step again from the journal, and compare",
    run="asyncrl_plugins.replay.command:run",
    parses_words=True,
)
