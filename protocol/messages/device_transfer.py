"""Weights from device memory to device memory: the learner offers, a server asks, both begin, the server ends."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.messages.wire import Fingerprint, PeerId, Version, Wire


class DeviceSource(Wire):
    """Weights that can be had from device memory to device memory."""

    uuid: Fingerprint
    """Of the CUDA device that they lie on."""
    total_bytes: int = Field(ge=0)
    """Of a version, which the receiver needs room for beside its model."""


class TransferRequest(Wire):
    """On the weights endpoint: send this version from your device memory into that of my engine."""

    type: Literal["transfer_request"] = "transfer_request"
    version: Version
    publication: PeerId
    nonce: PeerId
    """Names this transfer."""
    channel: Literal["nccl", "cuda_ipc"]
    receivers: int = Field(gt=0, le=64)
    """Processes of the engine, each of which takes all of it."""
    offset: int = Field(default=0, ge=0)
    """Bytes that all of them have from a transfer of this version that was cut off: go on from there."""


class CudaMemory(Wire):
    """Memory of the learner's that another process on the same GPU can open: CUDA's and torch's handles."""

    handle: bytes = Field(max_length=4096)
    nbytes: int = Field(gt=0)
    offset: int = Field(ge=0)
    counter: bytes = Field(max_length=4096)
    """Name of torch's count of receivers, in memory that both map."""
    counter_offset: int = Field(ge=0)
    event: bytes = Field(max_length=4096)
    """The memory is complete when this event has happened."""
    event_sync: bool


class TransferStart(Wire):
    """Both sides begin now, at the offset that was asked for. Each transfer has its own group."""

    type: Literal["transfer_start"] = "transfer_start"
    version: Version
    nonce: PeerId
    port: int = Field(default=0, ge=0, le=65535)
    """`nccl`: where the group meets, on the host that the server dialled."""
    memory: CudaMemory | None = None
    """`cuda_ipc`: what to copy from; until `transfer_end` it stays as it is."""


class TransferEnd(Wire):
    """The engine has all of it, or has given up: the learner may forget the transfer."""

    type: Literal["transfer_end"] = "transfer_end"
    nonce: PeerId
