"""Descriptions of the channels nccl and cuda_ipc, and configurations that they refuse."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.parts import NCCL_BYTES, ROLLOUT_ENGINES, WeightChannel
from asyncrl.config.run_sections import RunSections


def problems(config: RunSections) -> Iterator[str]:
    """Name each contradiction, with its fix."""
    for problem in _problems(config):
        yield (
            f"rollout.weights_channel is {config.rollout.weights_channel}, but {problem}. Set "
            "rollout.weights_channel=auto"
        )


def _problems(config: RunSections) -> Iterator[str]:
    rollout = config.rollout
    if config.model.lora.rank:
        yield "model.lora trains adapters, which are small and are read from files"
    if not ROLLOUT_ENGINES[rollout.engine].has_model:
        yield f"the {rollout.engine} engine has no model"
    for key, device in (("learner.device", config.learner.device), ("rollout.device", rollout.device)):
        if device == "cpu":
            yield f"{key} is cpu, and it goes from one CUDA device to another"
    if rollout.weights_channel == "cuda_ipc" and rollout.tensor_parallel_size > 1:
        yield f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, and it shares the memory of one GPU"
    if rollout.weights_channel == "nccl" and not config.network.is_open:
        yield (
            f"network.host is {config.network.host}, not loopback, and NCCL encrypts nothing (network.insecure=true "
            "allows that on a network that you trust)"
        )


CUDA_IPC = WeightChannel(
    implementation="asyncrl_plugins.device_channels.sender:DeviceWeights",
    receiver="asyncrl_plugins.device_channels.receiver:Receiver",
    obstacle="asyncrl_plugins.device_channels.obstacles:of_cuda_ipc",
    problems=problems,
    on_one_gpu=True,
)
NCCL = WeightChannel(
    implementation="asyncrl_plugins.device_channels.sender:DeviceWeights",
    receiver="asyncrl_plugins.device_channels.receiver:Receiver",
    obstacle="asyncrl_plugins.device_channels.obstacles:of_nccl",
    problems=problems,
    own_bytes=NCCL_BYTES,
)
