"""New weights for SGLang: a version as a folder in memory, with the names of the model folder's own files.

SGLang ignores names that it does not know, or dies of them. It has read the model folder by the names that stand there,
so a version under exactly these names fills what they have filled.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB
from asyncrl.model_files.folder import model_folder
from asyncrl.models.loading import skeleton
from asyncrl.models.published import published_tensors
from protocol.endpoints import SHARED_MEMORY
from rollout_server.engines.arrived_weights import ArrivedWeights

INDEX = "model.safetensors.index.json"


class VersionFolders:
    """Writes versions as SGLang reads them."""

    def __init__(self, config: ModelConfig):
        """Raises UserError for a folder whose names are not those that versions would be written under."""
        self._model: Any = skeleton(config)
        names = set(revert_weight_conversion(self._model, dict(published_tensors(self._model))))
        folder = model_folder(config)
        found = names_in(folder)
        if getattr(self._model.config, "tie_word_embeddings", False):
            found.discard("lm_head.weight")  # saved twice by some; published once
        if names != found:
            raise UserError(
                f"new weights would be written under {len(names - found)} names that the files in {folder} do not have "
                f"({', '.join(sorted(names - found)[:3])}), and {len(found - names)} of theirs would be missing "
                f"({', '.join(sorted(found - names)[:3])}): SGLang would leave them out. Save the model again with "
                "transformers 5 (save_pretrained), or set rollout.engine=vllm"
            )

    @property
    def text_config(self) -> Any:
        return self._model.config.get_text_config()

    @asynccontextmanager
    async def written(self, weights: ArrivedWeights) -> AsyncIterator[Path]:
        """Folder of a version, in shared memory where there is such; gone after the block."""
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="asyncrl-version-", dir=memory) as name:
            await asyncio.to_thread(self._write, weights, Path(name))
            yield Path(name)

    def _write(self, weights: ArrivedWeights, folder: Path) -> None:
        named: dict[str, torch.Tensor] = revert_weight_conversion(self._model, dict(weights))
        tensors = {name: tensor.contiguous() for name, tensor in named.items()}
        try:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as problem:
            raise UserError(
                f"version {weights.manifest.version} ({weights.manifest.total_bytes / GIB:.2f} GiB) cannot be written "
                f"to {folder.parent}, where SGLang would read it: {problem}. Make room there (docker run --shm-size)"
            ) from problem


def names_in(folder: Path) -> set[str]:
    """Names of the tensors in a model folder's safetensors files."""
    index = folder / INDEX
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names
