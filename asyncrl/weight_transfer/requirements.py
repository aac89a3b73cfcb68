"""Requirements of channels nccl and cuda_ipc on the devices, checked before any model is loaded."""

from __future__ import annotations

import torch

from asyncrl.config.device_rules import DEVICE_CHANNELS
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.devices import resolve_device

INSTEAD = "set rollout.weights_channel=auto"


def check_cuda(config: RunConfig, key: str, device: str) -> None:
    """Check one side on its own machine; `key` is the setting that names its device."""
    channel = config.rollout.weights_channel
    if channel in DEVICE_CHANNELS and resolve_device(device, key).type != "cuda":
        raise UserError(
            f"rollout.weights_channel is {channel}, which needs a CUDA device on both sides, but {key} is {device} and "
            f"torch {torch.__version__} sees none here. Use a machine with a GPU, or {INSTEAD}"
        )


def check_gpus(config: RunConfig) -> None:
    """Check both sides on one machine, which has CUDA devices."""
    channel, rollout = config.rollout.weights_channel, config.rollout
    if channel not in DEVICE_CHANNELS:
        return
    learners = resolve_device(config.learner.device, "learner.device").index or 0
    first = resolve_device(rollout.device, "rollout.device").index or 0
    engines = range(first, first + rollout.tensor_parallel_size)
    shared = learners in engines
    if channel == "nccl" and shared:
        raise UserError(
            f"rollout.weights_channel is nccl, but learner and engine both use cuda:{learners}, and NCCL refuses two "
            f"processes on one GPU. Set learner.device=cuda:{engines.stop}, or {INSTEAD}"
        )
    if channel == "cuda_ipc" and not shared:
        raise UserError(
            f"rollout.weights_channel is cuda_ipc, which shares the memory of one GPU, but the learner uses "
            f"cuda:{learners} and the engine cuda:{first}. Set learner.device=cuda:{first}, or {INSTEAD}"
        )
