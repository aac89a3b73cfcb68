"""Choice of the channel that weights come over: the best that both sides have, or the configured one (ADR 013)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.config.device_rules import DEVICE_CHANNELS, NCCL_BYTES
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from protocol.messages import Channel, DeviceSource
from rollout_server.engines.base import DeviceMemory
from rollout_server.weights.device_transfer import GIB

logger = logging.getLogger(__name__)


def choose_channel(
    configured: str,
    *,
    same_host: bool,
    source: DeviceSource | None,
    devices: Sequence[DeviceMemory],
    open_network: bool,
    leave_room: str,
) -> Channel:
    """The configured channel, or with `auto` the first that works. Raises UserError with the fix.

    `source` is the learner's device, `devices` are the engine's. `open_network`: traffic need not be encrypted.
    `leave_room`: how to free memory beside the engine's model (`how_to_leave_room`).
    """
    channels: tuple[Channel, ...] = ("cuda_ipc", "nccl", "shm", "zmq")
    for channel in channels:
        if configured not in ("auto", channel):
            continue
        if channel in DEVICE_CHANNELS:
            obstacle = _device_obstacle(channel, same_host, source, devices, open_network, leave_room)
        else:
            there = same_host or channel == "zmq"
            obstacle = "" if there else "this server does not share memory with the learner"
        if not obstacle:
            return channel
        if configured == channel:
            raise UserError(f"rollout.weights_channel is {channel}, but {obstacle}. Set rollout.weights_channel=auto")
        if source is not None:
            logger.info("weights do not come over %s: %s", channel, obstacle)
    raise AssertionError(f"{configured} is no channel")


def how_to_leave_room(config: RunConfig) -> str:
    """The setting that leaves memory free beside the engine's model."""
    if config.rollout.engine != "vllm":
        return "lower rollout.max_concurrent_sequences"
    if config.gpu_memory.budget_gib:
        return f"lower gpu_memory.budget_gib ({config.gpu_memory.budget_gib:g}), of which vLLM takes its share"
    return "lower gpu_memory_utilization in rollout.engine_args"


def _device_obstacle(
    channel: Channel,
    same_host: bool,
    source: DeviceSource | None,
    devices: Sequence[DeviceMemory],
    open_network: bool,
    leave_room: str,
) -> str:
    """The reason for which weights cannot come over `cuda_ipc` or `nccl`; empty if they can."""
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
        f"{least.free_bytes / GIB:.1f} free ({leave_room})"
    )
