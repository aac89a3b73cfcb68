"""Channels of new weights by name: those of the core, and those of plug-ins (`asyncrl.weight_channels`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.plugins import Part, descriptions, require_part


@dataclass(frozen=True, kw_only=True)
class WeightChannel(Part):
    """Description of a channel: from the learner's device memory into the engine's (`receiver`), or of bytes that
    servers pull over ZeroMQ (`puller`).

    Its implementation is the learner's end: a `learner.network.publication.DeviceSender`, or what opens a
    `learner.network.publication.SourceFinder`.
    """

    receiver: str = ""
    """`module:Class` of the server's end between device memories, a
    `rollout_server.weights.channels.DeviceReceiver`."""
    puller: str = ""
    """`module:Class` of the server's end over ZeroMQ, a `rollout_server.weights.channels.Puller`."""
    obstacle: str = ""
    """`module:function` with the arguments of `rollout_server.weights.channels.Obstacle`: the reason for which the
    channel cannot be used now, empty if it can."""
    on_one_gpu: bool = False
    """True if both sides have to be on one GPU."""
    own_bytes: int = 0
    """Device memory that the channel takes for itself on each side, beside a version."""
    host_versions: int = 1
    """Versions in host memory of each server that pulls them."""


BUILT_IN: Mapping[str, WeightChannel] = {name: WeightChannel(implementation="") for name in ("auto", "shm", "zmq")}
"""`auto` chooses; shared memory and ZeroMQ need no description."""


def weight_channel(name: str) -> WeightChannel:
    """Raises ValueError for a name that neither the core nor an installed plug-in has."""
    return require_part("weight_channels", name, BUILT_IN, "rollout.weights_channel")


def device_channels(configured: str) -> dict[str, WeightChannel]:
    """The channels between device memories that may be used: the configured one, or with `auto` the installed ones, the
    best first."""
    if configured == "auto":
        return {name: channel for name, channel in descriptions("weight_channels").items() if channel.receiver}
    channel = weight_channel(configured)
    return {configured: channel} if channel.receiver else {}
