"""Published weights: the manifest of a version, requests for its bytes, and transfers between device memories."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.frames import Blob
from protocol.messages.wire import Fingerprint, Many, PeerId, Seconds, Version, Wire


class TensorEntry(Wire):
    """One tensor's place in a publication and its checksum."""

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
    """Shape of low-rank adapters (LoRA), and modules trained whole: enough to build them on the base model."""

    rank: int = Field(gt=0)
    alpha: int = Field(gt=0)
    """Adapter output is scaled by alpha / rank."""
    target_modules: Many[str]
    """Full names of the linear layers with an adapter."""
    modules_to_save: Many[str] = ()
    """Full names of the modules whose weights travel whole."""


class WeightManifest(Wire):
    """Announces one policy version. Sent on the control socket; the data is fetched elsewhere."""

    type: Literal["weights"] = "weights"
    version: Version
    publication: PeerId
    """The publication's id: a learner that comes back reuses version numbers, not always for the same bits."""
    tensors: Many[TensorEntry]
    total_bytes: int
    shm_path: str = ""
    """Memory-mapped file with exactly this layout, for peers with the same `host_id`; empty: none."""
    adapter: AdapterSpec | None = None
    """The tensors are an adapter for the base model that both sides hold, under PEFT's names; None: a whole model."""


Channel = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
"""Name of the way of a version from the learner into an engine: `shm`, `zmq`, or one between device memories."""


class WeightsLoaded(Wire):
    """The server samples from this version from now on."""

    type: Literal["weights_loaded"] = "weights_loaded"
    version: Version
    channel: Channel
    transfer_s: Seconds
    load_s: Seconds


class ChunkRequest(Wire):
    """Asks for these bytes of this version, on the weights endpoint."""

    type: Literal["chunk_request"] = "chunk_request"
    version: Version
    publication: PeerId
    offset: int = Field(ge=0)
    nbytes: int = Field(gt=0)


class Chunk(Wire):
    """Bytes of a version, starting at `offset`."""

    type: Literal["chunk"] = "chunk"
    version: Version
    offset: int
    data: Blob


class SourceFailure(Wire):
    """Reason why a rollout server turned away from another one that sent it a version."""

    server_id: PeerId
    reason: Literal["checksum", "silent", "gone"]
    """`checksum`: bytes that differ from the learner's manifest; `gone`: it does not have the version (any more)."""


class SourceRequest(Wire):
    """Asks whom to fetch this version from; the same request again has the same answer."""

    type: Literal["source_request"] = "source_request"
    version: Version
    publication: PeerId
    session: PeerId
    """The `hello`'s: only the server itself knows it."""
    endpoint: str = Field(default="", max_length=200)
    """Endpoint at which the asking server passes the version on to others; empty: nowhere."""
    key: str = Field(default="", pattern=r"^[!-~]{0,40}$")
    """CURVE public key (Z85) of that endpoint; empty: none."""
    failure: SourceFailure | None = None
    """Failure of the last source; None on the first request."""


class Source(Wire):
    """Source of a version: the learner, or a rollout server that has it or is receiving it."""

    type: Literal["source"] = "source"
    version: Version
    server_id: str = Field(default="", max_length=200)
    """Empty: the learner itself, on this endpoint."""
    endpoint: str = Field(default="", max_length=200)
    key: str = Field(default="", pattern=r"^[!-~]{0,40}$")
    """CURVE public key (Z85) of that endpoint; empty: it has none."""
    peer_keys: Many[Annotated[str, Field(pattern=r"^[!-~]{40}$")]] = ()
    """CURVE public keys (Z85) of the servers that may fetch from the one that asked."""


class DeviceSource(Wire):
    """The learner's offer of weights from device memory to device memory."""

    uuid: Fingerprint
    """UUID of the CUDA device that holds the weights."""
    total_bytes: int = Field(ge=0)
    """Bytes of a version, for which the receiver needs room beside its model."""


class TransferRequest(Wire):
    """Asks the learner to send this version from its device memory into that of the server's engine."""

    type: Literal["transfer_request"] = "transfer_request"
    version: Version
    publication: PeerId
    nonce: PeerId
    """Names this transfer."""
    channel: Channel
    receivers: int = Field(gt=0, le=64)
    """Number of the engine's processes, each of which receives everything."""


class CudaMemory(Wire):
    """CUDA and torch handles of learner memory that another process on the same GPU can open, in torch's order."""

    handle: bytes = Field(max_length=4096)
    nbytes: int = Field(gt=0)
    offset: int = Field(ge=0)
    counter: bytes = Field(max_length=4096)
    """Name of torch's reference count of receivers, in memory that both map."""
    counter_offset: int = Field(ge=0)
    event: bytes = Field(max_length=4096)
    """The memory is complete when this event has happened."""
    event_sync: bool


class TransferStart(Wire):
    """Both sides begin now. Each transfer has its own group."""

    type: Literal["transfer_start"] = "transfer_start"
    version: Version
    nonce: PeerId
    port: int = Field(default=0, ge=0, le=65535)
    """Rendezvous port of the processes of the transfer, on the host that the server dialled; 0: there is `memory`."""
    memory: CudaMemory | None = None
    """Memory to copy from on the same GPU; it does not change until `transfer_end`."""


class TransferEnd(Wire):
    """The engine has received everything, or has given up: the learner may forget the transfer."""

    type: Literal["transfer_end"] = "transfer_end"
    nonce: PeerId
