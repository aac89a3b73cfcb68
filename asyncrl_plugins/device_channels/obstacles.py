"""Reasons for which weights cannot come over a channel between two devices now."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.parts import NCCL_BYTES
from protocol.messages import DeviceSource
from rollout_server.weights.channels import GIB, DeviceMemory


def of_cuda_ipc(
    source: DeviceSource | None, devices: Sequence[DeviceMemory], *, same_host: bool, open_network: bool
) -> str:
    uuids = [device.uuid for device in devices]
    if source is None or not devices:
        return _without_devices(source)
    if not same_host or uuids != [source.uuid]:
        return f"the engine is on {', '.join(uuids)}, not on the learner's GPU ({source.uuid}) alone"
    return _without_room(devices, source.total_bytes)


def of_nccl(
    source: DeviceSource | None, devices: Sequence[DeviceMemory], *, same_host: bool, open_network: bool
) -> str:
    if source is None or not devices:
        return _without_devices(source)
    if source.uuid in [device.uuid for device in devices]:
        return f"the engine shares the learner's GPU ({source.uuid}), and NCCL refuses two processes on one"
    if not open_network:
        return "NCCL encrypts nothing, and network.host is not loopback (network.insecure=true allows it)"
    return _without_room(devices, source.total_bytes + NCCL_BYTES)


def _without_devices(source: DeviceSource | None) -> str:
    if source is None:
        return (
            "the learner sends none from device memory: it is on a CPU, shares its device, has a budget for its memory "
            "(gpu_memory.budget_gib), or trains adapters"
        )
    return "the engine is not on a CUDA device"


def _without_room(devices: Sequence[DeviceMemory], needed: int) -> str:
    least = min(devices, key=lambda device: device.free_bytes)
    if least.free_bytes >= needed:
        return ""
    return (
        f"new weights arrive beside the engine's model, which needs {needed / GIB:.1f} GiB, and {least.uuid} has "
        f"{least.free_bytes / GIB:.1f} free (give the engine less: gpu_memory.budget_gib, gpu_memory_utilization in "
        "rollout.engine_args, or rollout.max_concurrent_sequences)"
    )
