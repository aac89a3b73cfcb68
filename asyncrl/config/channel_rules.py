"""Which settings contradict weights that come from device memory (rollout.weights_channel nccl or cuda_ipc)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

DEVICE_CHANNELS = ("nccl", "cuda_ipc")
NCCL_BYTES = 1 << 29
"""Device memory that NCCL takes for itself on each device, generously."""


def network_is_open(config: RunConfig) -> bool:
    """What travels without encryption stays on this machine, or the user allows it."""
    from protocol.endpoints import is_loopback  # not for everybody who reads a configuration: it imports ZeroMQ

    network = config.network
    return network.insecure or network.host == "localhost" or is_loopback(network.host)


def channel_problems(config: RunConfig) -> list[str]:
    """One line for each, with its fix."""
    rollout, learner = config.rollout, config.learner
    channel = rollout.weights_channel
    if channel not in DEVICE_CHANNELS:
        return []
    problems: list[str] = []
    if config.model.lora.rank:
        problems.append("model.lora trains adapters, which are small and are read from files")
    if rollout.engine == "scripted":
        problems.append("the scripted engine has no model")
    for key, device in (("learner.device", learner.device), ("rollout.device", rollout.device)):
        if device == "cpu":
            problems.append(f"{key} is cpu, and it goes from one CUDA device to another")
    if channel == "cuda_ipc" and rollout.tensor_parallel_size > 1:
        problems.append(
            f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, and it shares the memory of one GPU"
        )
    if channel == "nccl" and not network_is_open(config):
        problems.append(
            f"network.host is {config.network.host}, not loopback, and NCCL encrypts nothing (network.insecure=true "
            "allows that on a network that you trust)"
        )
    return [
        f"rollout.weights_channel is {channel}, but {problem}. Set rollout.weights_channel=auto" for problem in problems
    ]
