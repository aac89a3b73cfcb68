"""Versions of an adapter in vLLM: one slot, filled anew between two decode steps.

Every request names the slot, from the first one on: until a version comes it holds an adapter that changes nothing, so
that no request goes without the adapters that come while it runs. vLLM reads adapters from PEFT folders only; such a
folder lies in memory and is gone when vLLM has read it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.engine_rules import LARGEST_RANK_FOR_VLLM
from asyncrl.config.model import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.loading import CONNECTOR_NAMES, VISION_TOWER_NAMES, skeleton
from asyncrl.models.lora import adapter_name, add_adapter, write_adapter_folder
from asyncrl.models.published import published_tensors
from protocol.endpoints import SHARED_MEMORY
from protocol.messages import AdapterSpec
from rollout_server.engines.vllm.vllm_api import VllmApi

SLOT = 1
"""vLLM's number of the adapter. A number of its own for each version would let versions run side by side, but running
sequences are to go on with the new one."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK_FOR_VLLM)
"""Sizes of vLLM's slots."""


def slot_arguments(spec: AdapterSpec) -> dict[str, Any]:
    """Arguments of vLLM for one slot that the adapter fits in; the configuration has no rank above all."""
    sees = {*VISION_TOWER_NAMES, *CONNECTOR_NAMES}
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= spec.rank),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "enable_tower_connector_lora": any(sees & set(name.split(".")) for name in spec.target_modules),
    }


def no_adapter(model: ModelConfig, spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """Published tensors of an adapter that changes nothing. No weights are loaded for it."""
    meta = skeleton(model)
    add_adapter(meta, spec)
    return {name: torch.zeros_like(tensor, device="cpu") for name, tensor in published_tensors(meta)}


async def fill_slot(
    llm: Any, vllm: VllmApi, spec: AdapterSpec, version: int, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Any:
    """Returns what requests carry from now on. `load_inplace` on these would load it each time."""
    name = adapter_name(version, tensors)
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="asyncrl-adapter-", dir=memory) as parent:
        folder = Path(parent) / name
        write_adapter_folder(folder, spec, tensors)
        await llm.add_lora(vllm.LoRARequest(name, SLOT, str(folder), load_inplace=True))
    return vllm.LoRARequest(name, SLOT, str(folder))


async def check_slot(llm: Any) -> None:
    """Raises UserError if the model in vLLM has no place for a part of the adapter: it would be left out unseen."""
    nowhere = set.intersection(*map(set, await llm.collective_rpc("layers_without_slot")))
    if nowhere:
        raise UserError(
            f"vLLM takes no adapter in {len(nowhere)} of this model's layers, such as {min(nowhere)}. Leave them out "
            "(model.lora.target_modules, model.lora.vision_tower=false), or set rollout.engine=hf"
        )
