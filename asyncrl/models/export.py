"""Folders of models, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from asyncrl.errors import UserError
from asyncrl.processing.chat_template import ChatTemplate
from asyncrl.processing.completion_ends import completion_ends


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
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


def check_export(model: Any, processor: Any) -> None:
    """Raise UserError where what is written beside the weights could not be: transformers checks more when it saves
    than when it loads, and a run would be lost at its first checkpoint."""
    with TemporaryDirectory(prefix="asyncrl-export-") as folder:
        for part in (model.config, model.generation_config, processor):
            try:
                part.save_pretrained(folder)
            except Exception as problem:  # whatever a file that transformers has read is refused for
                raise UserError(
                    f"the model could not be saved after training: {type(part).__name__} of the model folder is "
                    f"refused ({type(problem).__name__}: {' '.join(str(problem).split())[:400]}). Correct its file"
                ) from problem


def _name_ends(generation: Any, processor: Any) -> None:
    named = generation.eos_token_id
    declared = named if isinstance(named, list) else [] if named is None else [named]
    tokenizer = getattr(processor, "tokenizer", processor)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = completion_ends(ChatTemplate(processor), tokenizer, [*declared, *own]).stop_token_ids
    if missing := [token for token in ends if token not in declared]:
        generation.eos_token_id = [*declared, *missing] if declared else missing


def export_model(model: Any, processor: Any, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write model, processor and tokenizer as a Hugging Face folder, with `state` in the place of the model's weights.
    `from_pretrained` loads it. Its generation_config.json names all ids at which completions ended in training."""
    _name_ends(model.generation_config, processor)

    def write(building: Path) -> None:
        model.save_pretrained(building, state_dict=None if state is None else dict(state))
        processor.save_pretrained(building)

    write_whole(folder, write)
