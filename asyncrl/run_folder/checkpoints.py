"""Folders of a run's checkpoints by their steps, and of the model in each."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
"""A checkpoint has a model or, if the run trains an adapter, an adapter."""
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_folder(run_path: Path, step: int) -> Path:
    return run_path / CHECKPOINTS / f"step-{step:06d}"


def checkpoint_folders(run_path: Path) -> dict[int, Path]:
    """Find the checkpoints, oldest first. A folder with any other name, such as a copy beside them, is ignored."""
    named = ((_NAME.fullmatch(path.name), path) for path in (run_path / CHECKPOINTS).glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))
