"""The rollout engine `scripted`, installed for this process and those that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = str(Path(__file__).with_name("scripted"))
"""A package, and beside it the metadata by which its entry point is found."""


def install_scripted_engine() -> None:
    """Add it to what asyncrl has found installed, too: that is looked for once in a process."""
    from asyncrl import plugins

    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), FOLDER)))
    plugins._entries.cache_clear()
    plugins.installed.cache_clear()
