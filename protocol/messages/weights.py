"""Published weights: what there is of them (learner -> rollout server), and their bytes on request."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.frames import Blob
from protocol.messages.wire import Many, PeerId, Seconds, Version, Wire


class TensorEntry(Wire):
    name: str
    dtype: str
    """Torch name without the prefix: `float32`, `bfloat16`, ..."""
    shape: Many[int]
    offset: int = Field(ge=0)
    """Bytes from the start of the publication."""
    nbytes: int = Field(ge=0)
    xxh3: int = Field(ge=0, lt=1 << 64)
    """XXH3, 64 bits, seed 0, of the tensor's bytes."""


class AdapterSpec(Wire):
    """What low-rank adapters (LoRA) look like: enough to build them on the base model."""

    rank: int = Field(gt=0)
    alpha: int = Field(gt=0)
    """Their output is scaled by alpha / rank."""
    target_modules: Many[str]
    """Full names of the linear layers with an adapter."""


class WeightManifest(Wire):
    """Announces one policy version. Sent on the control socket; the data is fetched elsewhere."""

    type: Literal["weights"] = "weights"
    version: Version
    publication: PeerId
    """Whose version: a learner that comes back gives the same numbers again, and not everywhere to the same bits."""
    tensors: Many[TensorEntry]
    total_bytes: int
    shm_path: str = ""
    """Memory-mapped file with exactly this layout, for peers with the same `host_id`; empty: none."""
    adapter: AdapterSpec | None = None
    """The tensors are an adapter for the base model that both sides hold, under PEFT's names; None: a whole model."""


Channel = Literal["shm", "zmq", "nccl", "cuda_ipc"]
"""How a version gets from the learner into an engine."""


class WeightsLoaded(Wire):
    """The server samples from this version from now on."""

    type: Literal["weights_loaded"] = "weights_loaded"
    version: Version
    channel: Channel
    transfer_s: Seconds
    load_s: Seconds


class ChunkRequest(Wire):
    """On the weights endpoint: give me these bytes of this version."""

    type: Literal["chunk_request"] = "chunk_request"
    version: Version
    publication: PeerId
    offset: int = Field(ge=0)
    nbytes: int = Field(gt=0)


class Chunk(Wire):
    type: Literal["chunk"] = "chunk"
    version: Version
    offset: int
    data: Blob
