"""The end product: a folder that `from_pretrained` loads, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


def export_model(model: Any, processor: Any, folder: Path) -> None:
    """Write model, processor and tokenizer as a Hugging Face folder.

    It appears under its name only when complete; an older folder of that name is replaced.
    """
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    model.save_pretrained(building)
    processor.save_pretrained(building)
    if folder.exists():
        replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
        folder.rename(replaced)
        building.rename(folder)
        shutil.rmtree(replaced)
    else:
        building.rename(folder)
