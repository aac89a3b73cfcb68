"""What vLLM's workers are told of a weight update; no tensor travels in it."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import UserError
from asyncrl.models.loading import CONNECTOR_NAMES, VISION_TOWER_NAMES
from protocol.messages import WeightManifest
from rollout_server.engines.base import ArrivedWeights
from rollout_server.weights.staging import StagedWeights


def weight_update(weights: ArrivedWeights) -> dict[str, Any]:
    """`worker.WeightUpdate`, as vLLM sends it to its workers."""
    if isinstance(weights, StagedWeights):
        return {"path": "", "total_bytes": 0, "tensors": []}
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
