"""A server's sockets to the learner, as the configuration says: limits, keys, and which addresses may do without."""

from __future__ import annotations

from pathlib import Path

import zmq.asyncio

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from protocol.codec import MIB, Expected, Limits
from protocol.curve import KeyFileError, read_server_keys
from protocol.endpoints import BindError
from protocol.sockets import ServerSocket


def dial(
    config: RunConfig, endpoint: str, expected: Expected, context: zmq.asyncio.Context | None = None
) -> ServerSocket:
    """Connect to one of the learner's endpoints. Raises UserError naming the setting to change."""
    network = config.network
    try:
        return ServerSocket(
            endpoint,
            expected,
            Limits(max_message_bytes=network.max_message_mib * MIB),
            keys=read_server_keys(Path(network.keys_dir)) if network.keys_dir else None,
            insecure=network.insecure,
            context=context,
        )
    except (BindError, KeyFileError) as error:
        raise UserError(str(error)) from error
