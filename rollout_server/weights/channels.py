"""Over which channel weights come: the best that both sides have, or the one asked for (docs/decisions/013)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from asyncrl.config.device_rules import NCCL_BYTES
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from protocol.messages import Channel, DeviceSource
from rollout_server.weights.staging import GIB, DeviceMemory

logger = logging.getLogger(__name__)

INSTEAD = "Set rollout.weights_channel=auto"


def choose_channel(
    configured: str,
    *,
    same_host: bool,
    source: DeviceSource | None,
    devices: Sequence[DeviceMemory],
    open_network: bool,
    leave_room: str,
) -> Channel:
    """`source` is the learner's device, `devices` are the engine's. `open_network`: nobody listens in, or it may.
    `leave_room`: how (`how_to_leave_room`).

    Raises UserError with the fix.
    """
    obstacles: dict[Channel, Callable[[], str]] = {
        "cuda_ipc": lambda: _without_cuda_ipc(same_host, source, devices, leave_room),
        "nccl": lambda: _without_nccl(source, devices, open_network, leave_room),
        "shm": lambda: "" if same_host else "this server does not share memory with the learner",
        "zmq": lambda: "",
    }
    for channel, obstacle in obstacles.items():
        if configured not in ("auto", channel):
            continue
        reason = obstacle()
        if not reason:
            return channel
        if configured == channel:
            raise UserError(f"rollout.weights_channel is {channel}, but {reason}. {INSTEAD}")
        if source is not None:
            logger.info("weights do not come over %s: %s", channel, reason)
    raise AssertionError(f"{configured} is no channel")


def how_to_leave_room(config: RunConfig) -> str:
    """Beside the engine's model."""
    if config.rollout.engine != "vllm":
        return "lower rollout.max_concurrent_sequences"
    if config.gpu_memory.budget_gib:
        return f"lower gpu_memory.budget_gib ({config.gpu_memory.budget_gib:g}), of which vLLM takes its share"
    return "lower gpu_memory_utilization in rollout.engine_args"


def _without_cuda_ipc(
    same_host: bool, source: DeviceSource | None, devices: Sequence[DeviceMemory], leave_room: str
) -> str:
    """Why not, or nothing."""
    if source is None or not devices:
        return _no_device(source)
    if not same_host or [device.uuid for device in devices] != [source.uuid]:
        return f"the engine is on {_named(devices)}, not on the learner's GPU ({source.uuid}) alone"
    return _no_room(source.total_bytes, devices, leave_room)


def _without_nccl(
    source: DeviceSource | None, devices: Sequence[DeviceMemory], open_network: bool, leave_room: str
) -> str:
    if source is None or not devices:
        return _no_device(source)
    if source.uuid in [device.uuid for device in devices]:
        return f"the engine shares the learner's GPU ({source.uuid}), and NCCL refuses two processes on one"
    if not open_network:
        return "NCCL encrypts nothing, and network.host is not loopback (network.insecure=true allows it)"
    return _no_room(source.total_bytes + NCCL_BYTES, devices, leave_room)


def _no_device(source: DeviceSource | None) -> str:
    if source is None:
        return (
            "the learner sends none from device memory: it is on a CPU, shares its device, has a budget for its memory "
            "(gpu_memory.budget_gib), or trains adapters"
        )
    return "the engine is not on a CUDA device"


def _no_room(needed: int, devices: Sequence[DeviceMemory], leave_room: str) -> str:
    least = min(devices, key=lambda device: device.free_bytes)
    if least.free_bytes >= needed:
        return ""
    return (
        f"new weights arrive beside the engine's model, which needs {needed / GIB:.1f} GiB, and {least.uuid} has "
        f"{least.free_bytes / GIB:.1f} free ({leave_room})"
    )


def _named(devices: Sequence[DeviceMemory]) -> str:
    return ", ".join(device.uuid for device in devices)
