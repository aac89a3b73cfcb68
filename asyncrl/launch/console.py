"""Rich's console. A reader who has gone ends a command as it does everywhere (`reader_gone.py`)."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Called where that was caught. Rich's own ends the program with 1."""
        raise
