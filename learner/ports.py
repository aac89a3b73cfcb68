"""The learner's two sockets: control and weights, open to loopback, to holders of a key, or to all if so told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import zmq

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from protocol.codec import MIB, Limits
from protocol.curve import KeyFileError, read_learner_keys
from protocol.endpoints import BindError
from protocol.gate import Gate
from protocol.messages import ChunkRequest, ControlFromServer
from protocol.peers import PeerLimits
from protocol.socket_options import CHUNK_QUEUES
from protocol.sockets import LearnerSocket

CHUNK_LIMITS = PeerLimits(messages=100_000)
"""10 GB/s of chunks of 1 MiB are legitimate."""


@dataclass(frozen=True)
class LearnerPorts:
    control: LearnerSocket
    weights: LearnerSocket
    gate: Gate | None
    """None without keys."""

    def take_rejections(self) -> Counter[str]:
        """Connections that did not get in, or were ended, since the last call, by kind."""
        taken = self.gate.take_rejections() if self.gate else Counter()
        ended = self.control.take_ended() + self.weights.take_ended()
        return taken + Counter(unfinished_message=ended)

    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()
        self.control.close()
        self.weights.close()


def open_ports(config: RunConfig, context: zmq.Context) -> LearnerPorts:
    """Both sockets, bound. Raises UserError naming the setting to change, and then leaves none open."""
    network = config.network
    limits = Limits(max_message_bytes=network.max_message_mib * MIB)
    gate: Gate | None = None
    opened: list[LearnerSocket] = []
    try:
        keys = read_learner_keys(Path(network.keys_dir)) if network.keys_dir else None
        gate = Gate(context, keys) if keys else None
        for endpoint, expected, setting, options in (
            (config.control_endpoint, get_args(ControlFromServer), "control_port", {}),
            (
                config.weights_endpoint,
                (ChunkRequest,),
                "weights_port",
                {"queues": CHUNK_QUEUES, "peer_limits": CHUNK_LIMITS},
            ),
        ):
            opened.append(
                LearnerSocket(
                    endpoint,
                    expected,
                    limits,
                    setting=f"network.{setting}",
                    insecure=network.insecure,
                    keys=keys,
                    gate=gate,
                    context=context,
                    **options,
                )
            )
    except (BindError, KeyFileError) as error:
        if gate is not None:
            gate.close()
        for socket in opened:
            socket.close()
        raise UserError(str(error)) from error
    if gate is not None:
        gate.start()
    control, weights = opened
    return LearnerPorts(control, weights, gate)
