"""Choice of the channel that weights come over: the best that both sides have, or the configured one (ADR 013)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.config.parts import WEIGHT_CHANNELS, device_channels
from asyncrl.config.run_sections import NetworkConfig
from asyncrl.errors import UserError
from asyncrl.plugins import implementation
from protocol.messages import Channel, DeviceSource, WeightManifest
from protocol.sockets import ServerSocket
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcesses

logger = logging.getLogger(__name__)
GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """A CUDA device that the model, or a part of it, lies on."""

    uuid: str
    free_bytes: int


class DeviceReceiver(Protocol):
    """The server's end of channels between device memories, which plug-ins bring. Made with the ModelProcesses of an
    engine."""

    async def devices(self) -> Sequence[DeviceMemory]:
        """Empty on a CPU."""
        ...

    async def fetch(
        self, socket: ServerSocket, manifest: WeightManifest, channel: Channel, **settings: Any
    ) -> ArrivedWeights:
        """Receive a version beside the model, verified. `settings`: host, timeout_s, and first_s, the deadline of the
        first transfer.

        Raises TimeoutError when a transfer fails although another attempt may succeed, and ProtocolError: VERSION_GONE
        if the learner has moved on, WRONG_CHANNEL if it sends nothing over this one or a side has no room, MALFORMED if
        what arrives is damaged.
        """
        ...

    async def drop(self) -> None:
        """Free what was received."""
        ...


class Puller(Protocol):
    """The server's end of a channel of bytes over ZeroMQ, which a plug-in brings. Made with the section network and
    the session of this server's hello."""

    async def receive(self, socket: ServerSocket, manifest: WeightManifest, into: memoryview) -> None:
        """Fill `into` with a version; `socket` goes to the learner's weights endpoint. Raises as
        `protocol.download.Pull.run` does where the learner sends."""
        ...

    def close(self) -> None: ...


class Obstacle(Protocol):
    """`WeightChannel.obstacle`. `source` is the learner's device, `devices` are the engine's; `open_network`: traffic
    need not be encrypted."""

    def __call__(
        self, source: DeviceSource | None, devices: Sequence[DeviceMemory], *, same_host: bool, open_network: bool
    ) -> str: ...


def open_receiver(channel: str, processes: ModelProcesses | None) -> DeviceReceiver | None:
    """The server's end of the channel, with `auto` of the first that is installed; None where there is none."""
    channels = device_channels(channel)
    if processes is None or not channels:
        return None
    return implementation(next(iter(channels.values())).receiver)(processes)


def open_puller(channel: str, network: NetworkConfig, session: str) -> Puller | None:
    """The server's end of a plug-in's channel over ZeroMQ; None where another channel is configured."""
    name = WEIGHT_CHANNELS[channel].puller
    return implementation(name)(network, session) if name else None


def choose_channel(
    configured: str,
    *,
    same_host: bool,
    source: DeviceSource | None,
    devices: Sequence[DeviceMemory],
    open_network: bool,
) -> Channel:
    """The configured channel, or with `auto` the first that works. Raises UserError with the fix.

    A warning says why weights do not come from GPU to GPU where both sides have one.
    """
    obstacles: dict[str, str] = {}
    between_devices = device_channels(configured)
    pulled = [configured] if WEIGHT_CHANNELS[configured].puller else []
    for channel in (*between_devices, "shm", "zmq", *pulled):
        if configured not in ("auto", channel):
            continue
        if channel in between_devices:
            find: Obstacle = implementation(between_devices[channel].obstacle)
            obstacle = find(source, devices, same_host=same_host, open_network=open_network)
        else:
            cannot_map = channel == "shm" and not same_host
            obstacle = "this server does not share memory with the learner" if cannot_map else ""
        if not obstacle:
            if obstacles and source is not None and devices and channel not in between_devices:
                logger.warning(
                    "weights come over %s, not from GPU to GPU: every version (%.1f GiB) is copied to the learner's "
                    "host memory, from there %sto the engine's GPU, and sampling waits for the last part. %s",
                    *(channel, source.total_bytes / GIB, "" if channel == "shm" else "over TCP "),
                    "; ".join(f"{name}: {reason}" for name, reason in obstacles.items()),
                )
            return channel
        obstacles[channel] = obstacle
    raise UserError(
        f"rollout.weights_channel is {configured}, but {obstacles[configured]}. Set rollout.weights_channel=auto"
    )
