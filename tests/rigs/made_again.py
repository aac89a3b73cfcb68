"""Steps of a run that are made again by `asyncrl replay`, where that plug-in is installed."""

from __future__ import annotations

from pathlib import Path

from asyncrl.plugins import implementation, installed


def is_made_again(run: Path, step: int) -> bool:
    """Return whether the step is equal when it is made again. True without the plug-in."""
    if "replay" not in installed("commands"):
        return True
    return implementation("asyncrl_plugins.replay.replay:main")([str(run), "--step", str(step)]) == 0
