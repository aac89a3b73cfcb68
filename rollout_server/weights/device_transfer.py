"""A version from the learner's device memory into the engine's: ask, receive beside the model, say that it is over."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.weight_transfer.group import TransferError
from asyncrl.weight_transfer.stage import Arrival, Stage, StageOrder, device_memory
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Error, TransferEnd, TransferRequest, TransferStart, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from rollout_server.engines.base import ArrivedWeights, DeviceMemory, Staging

logger = logging.getLogger(__name__)
RETRY_S = 1.0
"""Pause before the next attempt: the cause of this failure may need time to end."""
CHECK_EVERY_S = 0.02


async def receive(
    socket: ServerSocket,
    manifest: WeightManifest,
    channel: Literal["nccl", "cuda_ipc"],
    staging: Staging,
    *,
    host: str,
    timeout_s: float,
) -> None:
    """Returns when every receiver has the version, verified.

    Raises TimeoutError when a transfer fails although another attempt may succeed, and ProtocolError: VERSION_GONE if
    the learner has moved on, WRONG_CHANNEL if it sends nothing over this one or one of the two has no room, MALFORMED
    if what arrives is damaged.
    """
    request = TransferRequest(
        version=manifest.version,
        publication=manifest.publication,
        nonce=uuid.uuid4().hex[:12],
        channel=channel,
        receivers=staging.receivers,
    )
    start = await _ask(socket, request, timeout_s)
    order = StageOrder(
        version=manifest.version,
        nonce=start.nonce,
        host=host,
        port=start.port,
        size=1 + request.receivers,
        deadline_s=timeout_s,
        tensors=[tensor.model_dump() for tensor in manifest.tensors],
        memory=start.memory.model_dump() if start.memory else {},
    )
    try:
        await staging.receive(order)
    except TransferError as problem:
        await asyncio.sleep(RETRY_S)
        raise TimeoutError(f"{channel}: {problem}") from problem
    finally:
        try:
            await socket.send(TransferEnd(nonce=request.nonce), timeout_s=timeout_s)
        except SendTimeout as problem:
            logger.warning("%s; the learner ends the transfer at its own deadline", problem)


async def _ask(socket: ServerSocket, request: TransferRequest, timeout_s: float) -> TransferStart:
    deadline = time.monotonic() + timeout_s
    await socket.send(request, timeout_s=timeout_s)
    while (left_s := deadline - time.monotonic()) > 0:
        message = await socket.recv(left_s)
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.version in (None, request.version):
            raise ProtocolError(message.code, message.reason)
        elif isinstance(message, TransferStart) and message.nonce == request.nonce:
            if (request.channel == "nccl") == (message.memory is None) == bool(message.port):
                return message
            raise ProtocolError(
                ErrorCode.MALFORMED, f"the learner's answer for {request.channel} has the parts of another"
            )
    raise TimeoutError(
        f"waited {timeout_s:g} s for the learner at {socket.endpoint} to begin with version {request.version}"
    )


@dataclass(frozen=True)
class StagedWeights(ArrivedWeights):
    """Verified, and on the engine's own devices: in `stage`, or in those of its worker processes."""

    stage: Stage | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.stage is not None, "the workers load them"
        return self.stage.tensors()


class LocalStaging:
    """The receiver of an engine whose model is in this process."""

    receivers = 1

    def __init__(self, device: torch.device):
        self._device = device
        self._stage = Stage(device)

    async def devices(self) -> Sequence[DeviceMemory]:
        return [DeviceMemory(*memory) for memory in [device_memory(self._device)] if memory]

    async def receive(self, order: StageOrder) -> None:
        self._stage.begin(order, rank=1)

        async def look() -> list[Arrival]:
            return [self._stage.arrival]

        await until_arrived(order, look)

    def weights(self, manifest: WeightManifest) -> ArrivedWeights:
        return StagedWeights(manifest, {}, stage=self._stage)

    async def drop(self) -> None:
        self._stage.drop()


async def until_arrived(order: StageOrder, look: Callable[[], Awaitable[list[Arrival]]]) -> None:
    """Receivers keep their own deadlines; one that says nothing for twice as long is stuck. Raises as `receive`."""
    seen, since = [Arrival()], time.monotonic()
    while True:
        arrivals = await look()
        for number, arrival in enumerate(arrivals):
            reason = f"version {order.version}, receiver {number}: {arrival.problem}"
            if arrival.code:
                raise ProtocolError(ErrorCode(arrival.code), reason)
            if arrival.problem:
                raise TransferError(reason)
        if all(arrival.is_done for arrival in arrivals):
            return
        if arrivals != seen:
            seen, since = arrivals, time.monotonic()
        elif time.monotonic() - since > 2 * order.deadline_s:
            done = " and ".join(f"{arrival.arrived_bytes:,}" for arrival in arrivals)
            raise TransferError(
                f"waited {2 * order.deadline_s:g} s for version {order.version}: the receivers have {done} bytes"
            )
        await asyncio.sleep(CHECK_EVERY_S)
