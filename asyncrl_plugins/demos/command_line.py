"""Command line of the programs that write a demo's files: FOLDER [--seed 1]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def folder_and_seed(argv: Sequence[str] | None, description: str | None, seed: str) -> tuple[Path, int]:
    """The two arguments. `description`: text of --help; `seed`: words for what it decides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1, help=f"of {seed}")
    arguments = parser.parse_args(argv)
    return arguments.folder, arguments.seed
