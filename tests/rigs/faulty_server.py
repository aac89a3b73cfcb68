"""A rollout server with one fault of its engine: `python -m tests.rigs.faulty_server --config C FAULT`.

Each fault is one that people have met: the server says that all is well, and samples from another policy.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.service_entry import run_service
from rollout_server.__main__ import main
from rollout_server.engines.hf import decode_batch
from rollout_server.engines.hf.engine import HFEngine


def ignore_images() -> None:
    """Every picture is grey: tokens, grids and hashes are as they should be."""
    right = decode_batch.media_inputs

    def grey(*arguments: Any) -> dict[str, torch.Tensor]:
        made = right(*arguments)
        return {name: torch.zeros_like(t) if "pixel_values" in name else t for name, t in made.items()}

    decode_batch.media_inputs = grey


def keep_prefixes() -> None:
    """Keys and values of a prompt that was seen before are those of the weights that saw it first."""
    right, first = decode_batch.prefill, dict[bytes, Any]()
    """Model of the weights that have computed a prompt first."""
    models: list[Any] = []

    def cached(model: Any, prompts: Sequence[EncodedPrompt], device: torch.device) -> Any:
        keys = [prompt.token_ids.tobytes() + repr(prompt.image_hashes).encode() for prompt in prompts]
        if not models:
            models.append(copy.deepcopy(model))
        known = all(key in first for key in keys)
        first.update(dict.fromkeys(keys))
        return right(models[0] if known else model, prompts, device)

    decode_batch.prefill = cached


def leave_adapter_out() -> None:
    """The adapter's tensors are loaded, and no layer adds what they say."""
    right = HFEngine._load

    def load(self: Any) -> None:
        right(self)
        for module in self._model.modules():
            if isinstance(scaling := getattr(module, "scaling", None), dict):
                scaling.update(dict.fromkeys(scaling, 0.0))

    HFEngine._load = load


def keep_weights() -> None:
    """Every version is acknowledged, and none is loaded."""

    def load(self: Any, tensors: Any) -> None:
        for _ in tensors:
            pass

    HFEngine._load_weights = load


FAULTS: dict[str, Callable[[], None]] = {
    "blind": ignore_images,
    "prefix": keep_prefixes,
    "adapter": leave_adapter_out,
    "weights": keep_weights,
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop()]()
    run_service("rollout_server", main)
