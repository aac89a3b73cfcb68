"""A rollout server with one fault of its engine: `python -m tests.rigs.faulty_server --config C FAULT`.

It says that all is well, and samples from another policy than the published one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.service_entry import run_service
from rollout_server.__main__ import main
from rollout_server.engines.hf import decode_batch
from rollout_server.engines.hf.engine import HFEngine

hf: Any = HFEngine


def ignore_images() -> None:
    """Every picture is grey: tokens, grids and hashes are as they should be."""
    right = decode_batch.media_inputs

    def grey(*arguments: Any) -> dict[str, torch.Tensor]:
        made = right(*arguments)
        return {name: torch.zeros_like(value) if "pixel_values" in name else value for name, value in made.items()}

    decode_batch.media_inputs = grey


def keep_prefixes() -> None:
    """Keys and values of a prompt that was seen before are those of the weights that saw it first."""
    right = decode_batch.prefill
    first: list[Any] = []
    seen: set[bytes] = set()

    def cached(model: Any, prompts: Sequence[EncodedPrompt], device: torch.device) -> Any:
        if not first:
            first.append(copy.deepcopy(model))
        keys = {prompt.token_ids.tobytes() + repr(prompt.image_hashes).encode() for prompt in prompts}
        is_known = keys <= seen
        seen.update(keys)
        return right(first[0] if is_known else model, prompts, device)

    decode_batch.prefill = cached


def leave_adapter_out() -> None:
    """The adapter's tensors are loaded, and no layer adds what they say."""
    right = hf._load

    def load(self: Any) -> None:
        right(self)
        for module in self._model.modules():
            if isinstance(scaling := getattr(module, "scaling", None), dict):
                scaling.update(dict.fromkeys(scaling, 0.0))

    hf._load = load


def keep_weights() -> None:
    """Every version is acknowledged, and none is loaded."""
    hf._load_weights = lambda self, tensors: None


def keep_weights_of_vllm() -> None:
    async def swap(self: Any, version: int, weights: Any) -> None:
        await self._llm.update_weight_version(str(version))

    import_module("asyncrl_plugins.vllm.engine").VLLMEngine._swap = swap


FAULTS: dict[str, Callable[[], None]] = {
    "blind": ignore_images,
    "prefix": keep_prefixes,
    "adapter": leave_adapter_out,
    "weights": keep_weights,
    "vllm_weights": keep_weights_of_vllm,
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop()]()
    run_service("rollout_server", main)
