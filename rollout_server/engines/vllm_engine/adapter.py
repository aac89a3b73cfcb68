"""Versions of an adapter in vLLM: one slot, filled anew between two decode steps.

vLLM reads adapters from PEFT folders only. A version's folder lies in memory and is gone when vLLM has read it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.models.lora import adapter_name, write_adapter_folder
from protocol.endpoints import SHARED_MEMORY
from protocol.messages import AdapterSpec
from rollout_server.engines.base import ArrivedWeights
from rollout_server.engines.vllm_engine.library import Library

SLOT = 1
"""vLLM's number of the adapter. A number of its own for each version would let versions run side by side, but running
sequences are to go on with the new one."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's slots."""


def slot_arguments(spec: AdapterSpec) -> dict[str, Any]:
    """Arguments of vLLM for one slot that the adapter fits in. Raises UserError for a rank above all."""
    fitting = [rank for rank in RANKS if rank >= spec.rank]
    if not fitting:
        raise UserError(f"model.lora.rank is {spec.rank}, and vLLM takes at most {RANKS[-1]}. Lower it, or use hf")
    return {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1, "max_cpu_loras": 1}


@contextmanager
def adapter_folder(version: int, weights: ArrivedWeights, vllm: Library) -> Iterator[tuple[Any, Any]]:
    """What vLLM is told to load, and what later requests carry. `load_inplace` on requests would load it each time."""
    spec = weights.manifest.adapter
    assert spec is not None, "the fingerprint says that there is one"
    name = adapter_name(version, weights)
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="asyncrl-adapter-", dir=memory) as parent:
        folder = Path(parent) / name
        write_adapter_folder(folder, spec, weights)
        loaded = vllm.LoRARequest(name, SLOT, str(folder))
        yield vllm.LoRARequest(name, SLOT, str(folder), load_inplace=True), loaded
