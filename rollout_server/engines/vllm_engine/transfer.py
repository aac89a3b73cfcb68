"""What vLLM's weight-transfer backends are told, one function for each: no tensor travels in these.

`asyncrl_file` (shm and zmq channels) is ours and runs everywhere. `nccl` and `cuda_ipc` are vLLM's own, from the
learner's GPU to the workers': what is made for them here is checked against vLLM's types in the tests, and has not been
run on a GPU. The learner's half of those two does not exist yet, so `choose_channel` refuses them.
"""

from __future__ import annotations

from typing import Any

from asyncrl.errors import UserError
from asyncrl.models.loading import CONNECTOR_NAMES, VISION_TOWER_NAMES
from protocol.messages import WeightManifest
from rollout_server.engines.base import ArrivedWeights
from rollout_server.engines.vllm_engine.names import FILE_BACKEND

BACKENDS = {"shm": FILE_BACKEND, "zmq": FILE_BACKEND, "nccl": "nccl", "cuda_ipc": "ipc"}
"""Our channels and vLLM's names of what takes weights from them."""


def file_update(weights: ArrivedWeights) -> dict[str, Any]:
    """`worker.FileUpdate`, as vLLM sends it to its workers."""
    if not weights.path:
        raise UserError("the vllm engine maps new weights from a file in memory, which needs Linux. Use hf here")
    return {
        "path": weights.path,
        "total_bytes": weights.manifest.total_bytes,
        "tensors": [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in weights.manifest.tensors],
    }


def vision_entries(manifest: WeightManifest) -> frozenset[tuple[str, int]]:
    """Names and checksums of what makes image embeddings, the connector included.

    Equal for two versions exactly when cached embeddings stay valid. `model.freeze_vision_tower` does not decide it:
    the connector is trained all the same, and vLLM caches what comes out of it.
    """
    parts = {*VISION_TOWER_NAMES, *CONNECTOR_NAMES}
    return frozenset((t.name, t.xxh3) for t in manifest.tensors if parts & set(t.name.split(".")))


def nccl_init(address: str, port: int, workers: int) -> dict[str, Any]:
    """vLLM's NCCLWeightTransferInitInfo: the learner is rank 0, the workers follow."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + workers,
        "packed": True,
    }


def nccl_update(manifest: WeightManifest) -> dict[str, Any]:
    """vLLM's NCCLWeightTransferUpdateInfo: what is broadcast, in this order, in its own dtype."""
    return {
        "names": [t.name for t in manifest.tensors],
        "dtype_names": [t.dtype for t in manifest.tensors],
        "shapes": [list(t.shape) for t in manifest.tensors],
    }


def ipc_init() -> dict[str, Any]:
    """vLLM's IPCWeightTransferInitInfo: nothing to meet over."""
    return {"packed": False}


def ipc_update(manifest: WeightManifest, handles: list[dict[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """vLLM's IPCWeightTransferUpdateInfo. `handles`: of each tensor by GPU, from torch's `reduce_tensor`."""
    return {**nccl_update(manifest), "ipc_handles": handles}
