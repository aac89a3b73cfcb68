"""Folders of a run's checkpoints by their steps, and of the model in each."""

from __future__ import annotations

import re
from pathlib import Path

from asyncrl.errors import UserError

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


def find_checkpoint(run_path: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest one. Raises UserError."""
    checkpoints = checkpoint_folders(run_path)
    if not checkpoints:
        raise UserError(f"there is no checkpoint in {run_path / CHECKPOINTS}")
    step = max(checkpoints) if step is None else step
    if step not in checkpoints:
        raise UserError(f"there is no checkpoint of step {step}: {run_path} has those of {sorted(checkpoints)}")
    return checkpoints[step]
