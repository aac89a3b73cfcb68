"""The learner's two sockets, control and weights: open to loopback, to holders of a key, or to all if configured."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import zmq

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.errors import UserError
from protocol.codec import MIB, Limits
from protocol.curve import CurveAuthenticator, KeyFileError, read_learner_keys
from protocol.endpoints import BindError
from protocol.handshake import PeerLimits
from protocol.messages import ControlFromServer, WeightsFromServer
from protocol.sockets import CHUNK_QUEUES, CONTROL_QUEUES, LearnerSocket

CHUNK_LIMITS = PeerLimits(messages=100_000)
"""Message budget of a reader of weights: 10 GB/s in chunks of 1 MiB are legitimate."""


@dataclass(frozen=True)
class LearnerSockets:
    control: LearnerSocket
    weights: LearnerSocket
    authenticator: CurveAuthenticator | None
    """None without keys."""

    @property
    def known_keys(self) -> Callable[[], Collection[bytes]] | None:
        """Reads the public keys of the servers that may connect; None without keys."""
        return self.authenticator.authorised if self.authenticator else None

    def take_rejections(self) -> Counter[str]:
        """Connections rejected since the last call, by kind."""
        return self.authenticator.take_rejections() if self.authenticator else Counter()

    def close(self) -> None:
        if self.authenticator is not None:
            self.authenticator.close()
        self.control.close()
        self.weights.close()


def open_sockets(network: NetworkConfig, largest_group: int, context: zmq.Context) -> LearnerSockets:
    """Bind both sockets, or neither, for groups of at most so many bytes. Raises UserError naming the setting to
    change."""
    _allow_many_connections()
    limits = Limits(max_message_bytes=network.max_message_mib * MIB)
    authenticator: CurveAuthenticator | None = None
    opened: list[LearnerSocket] = []
    try:
        if network.keys_dir:
            authenticator = CurveAuthenticator(context, read_learner_keys(Path(network.keys_dir)))
        control = (network.control_endpoint, get_args(ControlFromServer), "control_port")
        weights = (network.weights_endpoint, get_args(WeightsFromServer), "weights_port")
        for (endpoint, expected, setting), array_bytes, queues, peer_limits in (
            (control, largest_group, CONTROL_QUEUES, PeerLimits()),
            (weights, 0, CHUNK_QUEUES, CHUNK_LIMITS),
        ):
            opened.append(
                LearnerSocket(
                    endpoint,
                    expected,
                    limits,
                    setting=f"network.{setting}",
                    inbound=_inbound(limits, array_bytes),
                    insecure=network.insecure,
                    authenticator=authenticator,
                    queues=queues,
                    peer_limits=peer_limits,
                    context=context,
                )
            )
    except (BindError, KeyFileError) as error:
        if authenticator is not None:
            authenticator.close()
        for socket in opened:
            socket.close()
        raise UserError(str(error)) from error
    control_socket, weights_socket = opened
    return LearnerSockets(control_socket, weights_socket, authenticator)


def _allow_many_connections() -> None:
    """Raise this process's limit of open files as far as the system lets it: a server takes two, and the usual limit of
    1,024 would be 500 servers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a system that says no limit and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _inbound(limits: Limits, array_bytes: int) -> Limits:
    """Message limits of an endpoint at which at most `array_bytes` of arrays arrive in one message."""
    return replace(limits, max_message_bytes=min(limits.max_message_bytes, limits.max_header_bytes + array_bytes))
