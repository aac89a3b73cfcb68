"""Choice of a demo: the digits of this package, or one of an installed plug-in (entry points `asyncrl.demos`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl import plugins
from asyncrl.errors import UserError

DIGITS = plugins.Demo(help="handwritten digits, with a tiny model of random weights", run="asyncrl.demo.command:demo")


@dataclass(frozen=True)
class DemoRequest:
    """Wishes of the command line."""

    changes: Sequence[str] = ()
    """Overlays and `key=value` of the run of reinforcement learning."""
    folder: Path | None = None
    seed: int = 1
    from_scratch: bool = False
    quick: bool = False

    @property
    def new_folder(self) -> Path:
        """The given folder, or the first of runs/demo-1, runs/demo-2, ... that is not there.

        Raises UserError for a folder that has something in it."""
        if self.folder and self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"--folder is {self.folder}, which is there already and not empty: name a new folder")
        return self.folder or next_folder("demo")


def next_folder(name: str) -> Path:
    number = 1
    while Path(f"runs/{name}-{number}").exists():
        number += 1
    return Path(f"runs/{name}-{number}")


def demos() -> dict[str, plugins.Demo]:
    """Demos by name."""
    return {"digits": DIGITS, **plugins.descriptions("demos")}


def chosen(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Name of the demo, and the words behind it. Without a name: the main one of the plug-ins, else digits."""
    found = demos()
    if words and words[0] in found:
        return words[0], words[1:]
    return next((name for name, demo in found.items() if demo.is_main), "digits"), words
