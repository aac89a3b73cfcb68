"""New weights in vLLM: the update that its workers get, the workers themselves, and its adapter slot.

Every request of a LoRA run names the slot, from the first one on: until a version comes it holds an adapter that
changes nothing. vLLM reads adapters from PEFT folders only; such a folder lies in memory and is gone when vLLM has read
it.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.loading import skeleton
from asyncrl.models.lora import add_adapter, write_adapter_folder
from asyncrl.models.parts import part_of
from asyncrl.models.published import published_tensors
from asyncrl_plugins.vllm.start import await_or_engine_death
from protocol.endpoints import SHARED_MEMORY
from protocol.messages import AdapterSpec, WeightManifest
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcess

SLOT = 1
"""Number of the adapter in vLLM. A number of its own for each version would let versions run side by side, but running
sequences are to go on with the new one."""


def weight_update(weights: ArrivedWeights) -> dict[str, Any]:
    """Fields of `worker.WeightUpdate`, as vLLM sends them to its workers; no tensor travels in them."""
    if weights.staged:
        return {"path": "", "staged": weights.staged, "total_bytes": 0, "tensors": []}
    if not weights.path:
        raise UserError("the vllm engine maps new weights from a file in memory, which needs Linux. Use hf here")
    return {
        "path": weights.path,
        "staged": "",
        "total_bytes": weights.manifest.total_bytes,
        "tensors": [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in weights.manifest.tensors],
    }


def vision_entries(manifest: WeightManifest) -> frozenset[tuple[str, int]]:
    """Names and checksums of the tensors that make image embeddings, the connector's included.

    Equal for two versions exactly when cached embeddings stay valid. `model.freeze_vision_tower` does not decide it:
    the connector is trained all the same, and vLLM caches what comes out of it.
    """
    return frozenset((t.name, t.xxh3) for t in manifest.tensors if part_of(t.name.split(".")) != "language_model")


class WorkerProcesses:
    """vLLM's workers, each of which has the model or its part."""

    own: ModelProcess | None = None

    def __init__(self, llm: Any, at_rest: Callable[[], AbstractAsyncContextManager[None]]):
        """`at_rest()` gives a block in which vLLM computes nothing."""
        self.count: int = llm.vllm_config.parallel_config.world_size
        self.at_rest = at_rest
        self._llm = llm

    async def run(self, function: str, *arguments: Any) -> list[Any]:
        call = self._llm.collective_rpc("run_in_model_process", args=(function, *arguments))
        return await await_or_engine_death(self._llm, call)


def no_adapter(model: ModelConfig, spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """Published tensors of an adapter that changes nothing. No weights are loaded for it."""
    meta = skeleton(model)
    add_adapter(meta, spec)
    return {name: torch.zeros_like(tensor, device="cpu") for name, tensor in published_tensors(meta)}


async def fill_slot(llm: Any, spec: AdapterSpec, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Load a version of the adapter. Returns the request for it that completions carry from now on.

    That one goes without `load_inplace`, or each completion would load the adapter again.

    No two adapters have one name: vLLM finds cached prefixes by it, and a restarted learner may make version 7 again.
    """
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    name = f"v{version}-{uuid.uuid4().hex[:8]}"
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="asyncrl-adapter-", dir=memory) as parent:
        folder = Path(parent) / name
        write_adapter_folder(folder, spec, tensors)
        await llm.add_lora(LoRARequest(name, SLOT, str(folder), load_inplace=True))
    return LoRARequest(name, SLOT, str(folder))


async def check_slot(llm: Any) -> None:
    """Raises UserError if the model in vLLM has no place for a part of the adapter: it would be left out unseen."""
    nowhere = set.intersection(*map(set, await llm.collective_rpc("layers_without_slot")))
    if nowhere:
        raise UserError(
            f"vLLM takes no adapter in {len(nowhere)} of this model's layers, such as {min(nowhere)}. Leave them out "
            "(model.lora.target_modules, model.lora.vision_tower=false), or set rollout.engine=hf"
        )
