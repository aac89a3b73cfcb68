"""Choice of the channel that weights come over: the best that both sides have, or the configured one (ADR 013)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.config.device_rules import DEVICE_CHANNELS, NCCL_BYTES
from asyncrl.errors import UserError
from protocol.messages import Channel, DeviceSource
from rollout_server.weights.staging import DeviceMemory

logger = logging.getLogger(__name__)
CHANNELS: tuple[Channel, ...] = ("cuda_ipc", "nccl", "shm", "zmq")
"""Channels, the best first."""
GIB = 1 << 30


def choose_channel(
    configured: str,
    *,
    same_host: bool,
    source: DeviceSource | None,
    devices: Sequence[DeviceMemory],
    open_network: bool,
) -> Channel:
    """The configured channel, or with `auto` the first that works. Raises UserError with the fix.

    `source` is the learner's device, `devices` are the engine's. `open_network`: traffic need not be encrypted. A
    warning says why weights do not come from GPU to GPU where both sides have one.
    """
    obstacle = "there is no such channel"
    obstacles: list[str] = []
    for channel in CHANNELS:
        if configured not in ("auto", channel):
            continue
        obstacle = _obstacle(channel, same_host, source, devices, open_network)
        if not obstacle:
            if source is not None and devices and channel not in DEVICE_CHANNELS:
                logger.warning(
                    "weights come over %s, not from GPU to GPU: every version (%.1f GiB) is copied to the learner's "
                    "host memory, from there %sto the engine's GPU, and sampling waits for the last part. %s",
                    *(channel, source.total_bytes / GIB, "" if channel == "shm" else "over TCP "),
                    "; ".join(obstacles),
                )
            return channel
        obstacles.append(f"{channel}: {obstacle}")
    raise UserError(f"rollout.weights_channel is {configured}, but {obstacle}. Set rollout.weights_channel=auto")


def _obstacle(
    channel: Channel,
    same_host: bool,
    source: DeviceSource | None,
    devices: Sequence[DeviceMemory],
    open_network: bool,
) -> str:
    """The reason for which weights cannot come over a channel; empty if they can."""
    if channel == "zmq":
        return ""
    if channel == "shm":
        return "" if same_host else "this server does not share memory with the learner"
    if source is None:
        return (
            "the learner sends none from device memory: it is on a CPU, shares its device, has a budget for its memory "
            "(gpu_memory.budget_gib), or trains adapters"
        )
    if not devices:
        return "the engine is not on a CUDA device"
    uuids, needed = [device.uuid for device in devices], source.total_bytes
    if channel == "cuda_ipc":
        if not same_host or uuids != [source.uuid]:
            return f"the engine is on {', '.join(uuids)}, not on the learner's GPU ({source.uuid}) alone"
    else:
        needed += NCCL_BYTES
        if source.uuid in uuids:
            return f"the engine shares the learner's GPU ({source.uuid}), and NCCL refuses two processes on one"
        if not open_network:
            return "NCCL encrypts nothing, and network.host is not loopback (network.insecure=true allows it)"
    least = min(devices, key=lambda device: device.free_bytes)
    if least.free_bytes >= needed:
        return ""
    return (
        f"new weights arrive beside the engine's model, which needs {needed / GIB:.1f} GiB, and {least.uuid} has "
        f"{least.free_bytes / GIB:.1f} free (give the engine less: gpu_memory.budget_gib, gpu_memory_utilization in "
        "rollout.engine_args, or rollout.max_concurrent_sequences)"
    )
