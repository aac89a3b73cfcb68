"""The end product: a folder that `from_pretrained` loads, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.load import load_config
from asyncrl.errors import UserError
from asyncrl.run_folder.contents import ADAPTER_FOLDER, MODEL_FOLDER
from asyncrl.telemetry.recorder import CONFIG_FILE


def export_model(model: Any, processor: Any, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write model, processor and tokenizer as a Hugging Face folder, with `state` in the place of the model's weights.

    It appears under its name only when complete; an older folder of that name is replaced.
    """
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    model.save_pretrained(building, state_dict=None if state is None else dict(state))
    processor.save_pretrained(building)
    if folder.exists():
        replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
        folder.rename(replaced)
        building.rename(folder)
        shutil.rmtree(replaced)
    else:
        building.rename(folder)


def export_checkpoint(run_path: Path, checkpoint: Path, target: Path, *, keep_adapter: bool) -> str:
    """Write a checkpoint's model to the new folder `target`, and say how.

    What a LoRA run trained is merged with its base model into an ordinary folder, or kept as a PEFT folder.
    """
    adapter = checkpoint / ADAPTER_FOLDER
    if not adapter.is_dir():
        if keep_adapter:
            raise UserError(f"{run_path} trained the model itself: there is no adapter to keep. Leave --adapter out")
        shutil.copytree(checkpoint / MODEL_FOLDER, target)
        return f"{target} is a copy of {checkpoint / MODEL_FOLDER}"
    if keep_adapter:
        shutil.copytree(adapter, target)
        return f"{target} is a copy of {adapter}: PeftModel.from_pretrained(base, {str(target)!r}) loads it"
    from asyncrl.models.lora import load_merged
    from asyncrl.processing.processor import PromptProcessor

    model = load_config(run_path / CONFIG_FILE, []).model
    export_model(load_merged(model, adapter), PromptProcessor(model).processor, target)
    return f"{target} is {model.path} with {adapter} merged into it"
