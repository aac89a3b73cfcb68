"""Folders of models, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, which appears as `folder` when it is complete; an older one is replaced."""
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write(building)
    if folder.exists():
        replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
        folder.rename(replaced)
        building.rename(folder)
        shutil.rmtree(replaced)
    else:
        building.rename(folder)


def export_model(model: Any, processor: Any, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write model, processor and tokenizer as a Hugging Face folder, with `state` in the place of the model's weights.
    `from_pretrained` loads it."""

    def write(building: Path) -> None:
        model.save_pretrained(building, state_dict=None if state is None else dict(state))
        processor.save_pretrained(building)

    write_whole(folder, write)
