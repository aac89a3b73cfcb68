"""A version from the learner's device memory into the engine's: ask, receive beside the model, say that it is over."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from asyncrl_plugins.device_channels.group import TransferError
from asyncrl_plugins.device_channels.stage import StageOrder
from asyncrl_plugins.device_channels.staging import Staging
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Channel, Error, TransferEnd, TransferRequest, TransferStart, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcesses
from rollout_server.weights.channels import DeviceMemory

logger = logging.getLogger(__name__)
RETRY_S = 1.0
"""Pause before the next attempt: the cause of this failure may need time to end."""


class Receiver:
    """The server's end of both channels."""

    def __init__(self, processes: ModelProcesses):
        self.staging = Staging(processes)

    async def devices(self) -> Sequence[DeviceMemory]:
        return await self.staging.devices()

    async def fetch(
        self, socket: ServerSocket, manifest: WeightManifest, channel: Channel, **settings: Any
    ) -> ArrivedWeights:
        await receive(socket, manifest, channel, self.staging, **settings)
        return self.staging.weights(manifest)

    async def drop(self) -> None:
        await self.staging.drop()


async def receive(
    socket: ServerSocket,
    manifest: WeightManifest,
    channel: Channel,
    staging: Staging,
    *,
    host: str,
    timeout_s: float,
    first_s: float = 0.0,
) -> None:
    """Returns when every receiver has the version, verified. `first_s` is the deadline of the first communicator.

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
        first_s=first_s,
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
