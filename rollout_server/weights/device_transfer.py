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
from rollout_server.weights.staging import Staging

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
    """Returns when every receiver has the version, verified. A transfer that is cut off goes on in the next one.

    Raises TimeoutError when a transfer brings nothing, although another attempt may succeed, and ProtocolError:
    VERSION_GONE if the learner has moved on, WRONG_CHANNEL if it sends nothing over this one or one of the two has no
    room, MALFORMED if what arrives is damaged.
    """
    damaged, offset = 0, 0
    while True:
        request = TransferRequest(
            version=manifest.version,
            publication=manifest.publication,
            nonce=uuid.uuid4().hex[:12],
            channel=channel,
            receivers=staging.receivers,
            offset=offset,
        )
        start = await _ask(socket, request, timeout_s)
        try:
            return await staging.receive(_order(manifest, request, start, host, timeout_s))
        except DamagedError as problem:
            logger.warning("%s: %s", channel, problem)
            damaged, offset = damaged + 1, 0  # nobody knows where
            if damaged == ATTEMPTS:
                reason = f"{problem}, after {ATTEMPTS} transfers. The link or a memory corrupts data"
                raise ProtocolError(ErrorCode.MALFORMED, reason) from problem
        except TransferError as problem:
            await asyncio.sleep(RETRY_S)
            if problem.arrived_bytes <= offset:
                raise TimeoutError(f"{channel}: {problem}") from problem
            offset = problem.arrived_bytes
            logger.warning("%s: %s; going on at byte %s", channel, problem, f"{offset:,}")
        finally:
            await _end(socket, request.nonce, timeout_s)


def _order(
    manifest: WeightManifest, request: TransferRequest, start: TransferStart, host: str, timeout_s: float
) -> StageOrder:
    return StageOrder(
        version=manifest.version,
        nonce=start.nonce,
        host=host,
        port=start.port,
        size=1 + request.receivers,
        deadline_s=timeout_s,
        tensors=[tensor.model_dump() for tensor in manifest.tensors],
        memory=start.memory.model_dump() if start.memory else {},
        offset=request.offset,
    )


async def _end(socket: ServerSocket, nonce: str, timeout_s: float) -> None:
    try:
        await socket.send(TransferEnd(nonce=nonce), timeout_s=timeout_s)
    except SendTimeout as problem:
        logger.warning("%s; the learner ends the transfer at its own deadline", problem)


async def _ask(socket: ServerSocket, request: TransferRequest, timeout_s: float) -> TransferStart:
    deadline = time.monotonic() + timeout_s
    await socket.send(request, timeout_s=timeout_s)
    while (left_s := deadline - time.monotonic()) > 0:
        message = await socket.recv(left_s)
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.code is ErrorCode.TOO_LARGE:
            await asyncio.sleep(RETRY_S)
            raise TimeoutError(f"the learner is busy: {message.reason}")
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
