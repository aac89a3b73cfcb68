"""A version from the learner's device memory into the engine's: ask, receive beside the model, say that it is over."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Literal

from asyncrl.weight_transfer.group import DamagedError, TransferError
from asyncrl.weight_transfer.stage import StageOrder
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Error, TransferEnd, TransferRequest, TransferStart, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from rollout_server.staging import Staging

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often a version may arrive damaged before we give up."""
RETRY_S = 1.0
"""Before the next attempt: whatever ended this one may need time to end, too."""


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

    Raises TimeoutError where the next attempt, a new transfer from the beginning, may succeed, and ProtocolError:
    VERSION_GONE if the learner has moved on, WRONG_CHANNEL if it sends nothing over this one or one of the two has no
    room, MALFORMED if what arrives is damaged.
    """
    for attempt in range(1, ATTEMPTS + 1):
        nonce = uuid.uuid4().hex[:12]
        start = await _ask(socket, manifest.version, nonce, channel, staging.receivers, timeout_s)
        try:
            return await staging.receive(_order(manifest, start, staging, host, timeout_s))
        except DamagedError as problem:
            logger.warning("%s: %s", channel, problem)
            if attempt == ATTEMPTS:
                reason = f"{problem}, after {ATTEMPTS} transfers. The link or a memory corrupts data"
                raise ProtocolError(ErrorCode.MALFORMED, reason) from problem
        except TransferError as problem:
            await asyncio.sleep(RETRY_S)
            raise TimeoutError(f"{channel}: {problem}") from problem
        finally:
            await _end(socket, nonce, timeout_s)


def _order(manifest: WeightManifest, start: TransferStart, staging: Staging, host: str, timeout_s: float) -> StageOrder:
    return StageOrder(
        version=manifest.version,
        nonce=start.nonce,
        host=host,
        port=start.port,
        size=1 + staging.receivers,
        deadline_s=timeout_s,
        tensors=[tensor.model_dump() for tensor in manifest.tensors],
        memory=start.memory.model_dump() if start.memory else {},
    )


async def _end(socket: ServerSocket, nonce: str, timeout_s: float) -> None:
    try:
        await socket.send(TransferEnd(nonce=nonce), timeout_s=timeout_s)
    except SendTimeout as problem:
        logger.warning("%s; the learner ends the transfer at its own deadline", problem)


async def _ask(
    socket: ServerSocket,
    version: int,
    nonce: str,
    channel: Literal["nccl", "cuda_ipc"],
    receivers: int,
    timeout_s: float,
) -> TransferStart:
    deadline = time.monotonic() + timeout_s
    request = TransferRequest(version=version, nonce=nonce, channel=channel, receivers=receivers)
    await socket.send(request, timeout_s=timeout_s)
    while (left_s := deadline - time.monotonic()) > 0:
        message = await socket.recv(left_s)
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.code is ErrorCode.TOO_LARGE:
            await asyncio.sleep(RETRY_S)
            raise TimeoutError(f"the learner is busy: {message.reason}")
        elif isinstance(message, Error) and message.version in (None, version):
            raise ProtocolError(message.code, message.reason)
        elif isinstance(message, TransferStart) and message.nonce == nonce:
            if (channel == "nccl") == (message.memory is None) == bool(message.port):
                return message
            raise ProtocolError(ErrorCode.MALFORMED, f"the learner's answer for {channel} has the parts of another")
    raise TimeoutError(f"waited {timeout_s:g} s for the learner at {socket.endpoint} to begin with version {version}")
