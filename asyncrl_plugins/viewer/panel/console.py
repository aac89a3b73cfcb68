"""Rich's console for commands whose reader may go away (asyncrl/launch/command.py)."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again. Rich itself would end the program with code 1."""
        raise
