"""Device names and settings that contradict them: invalid names, channels between devices, sync mode.

These are names only: what a machine has is asked where torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from asyncrl.config.run_sections import RunSections
from asyncrl.config.weight_channels import weight_channel

NCCL_BYTES = 1 << 29
"""Device memory that NCCL takes for itself on each device, generously."""
_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


def meant_device(name: str, *, cuda: bool) -> str:
    """Resolve a device's name: `auto` is the first CUDA device where there are some (`cuda`), else the CPU; `cuda` is
    the first one."""
    if name == "auto" and not cuda:
        return "cpu"
    return "cuda:0" if name in ("auto", "cuda") else name


def meant_dtype(dtype: str, devices: Iterable[str], *, cuda: bool) -> str:
    """Resolve model.dtype: `auto` is bfloat16 where both sides are on GPUs, which compute it several times as fast as
    float32 and exactly enough on fp32 master weights; few CPUs have it at all."""
    if dtype != "auto":
        return dtype
    return "float32" if "cpu" in (meant_device(name, cuda=cuda) for name in devices) else "bfloat16"


def same_device(config: RunSections, *, cuda: bool) -> bool:
    """True if learner and rollout server use the same device; any `cuda` name implies a machine with CUDA."""
    names = (config.learner.device, config.rollout.device)
    cuda = cuda or any(name.startswith("cuda") for name in names)
    learner, rollout = (meant_device(name, cuda=cuda) for name in names)
    return learner == rollout


def network_is_open(config: RunSections) -> bool:
    """True if unencrypted traffic is allowed: network.host is loopback, or network.insecure is true."""
    from protocol.endpoints import is_loopback  # imports ZeroMQ, which reading a configuration does not need

    network = config.network
    return network.insecure or network.host == "localhost" or is_loopback(network.host)


def device_problems(config: RunSections) -> Iterator[str]:
    """Name each contradiction, with its fix."""
    for key, name in (("learner.device", config.learner.device), ("rollout.device", config.rollout.device)):
        if not _NAME.fullmatch(name):
            yield f"{key} is {name!r}, not a device name. Set {key}=auto, cpu, cuda, or cuda:1 for the second GPU"
    yield from weight_channel(config.rollout.weights_channel).problems(config)
    if config.trainer.mode == "sync":
        yield from _sync_problems(config)


def imply_staleness_0(values: Any) -> Any:
    """Default learner.max_staleness to 0 in sync mode."""
    if not isinstance(values, dict):
        return values
    trainer, learner = values.get("trainer"), values.get("learner", {})
    if not isinstance(trainer, dict) or trainer.get("mode") != "sync" or not isinstance(learner, dict):
        return values
    return {**values, "learner": {"max_staleness": 0, **learner}}


def two_devices(config: RunSections) -> str:
    """Error message for sync mode on two devices."""
    return (
        f"trainer.mode is sync, but learner.device is {config.learner.device} and rollout.device is "
        f"{config.rollout.device}: sync mode needs one device. Set both to the same, or trainer.mode=async"
    )


def _sync_problems(config: RunSections) -> Iterator[str]:
    """Check sync mode: staleness 0, one server on the learner's devices, no device channel.

    Whether `auto` is the other side's device may depend on the machine: asyncrl/checks/inputs.py checks it."""
    learner, rollout = config.learner, config.rollout
    if learner.max_staleness != 0:
        yield (
            f"trainer.mode is sync and learner.max_staleness is {learner.max_staleness}: taking turns, the server only "
            "has the learner's own version. Set learner.max_staleness=0, or trainer.mode=async"
        )
    ranks = learner.num_processes
    for name, most, why in (
        ("servers", 1, "the learner shares its device with one server"),
        ("tensor_parallel_size", ranks, "there is one device" if ranks == 1 else f"the ranks have {ranks} devices"),
    ):
        if getattr(rollout, name) > most:
            yield (
                f"trainer.mode is sync and rollout.{name} is {getattr(rollout, name)}: {why}. Set rollout.{name}={most}"
                ", or trainer.mode=async"
            )
    if not same_device(config, cuda=False):
        yield two_devices(config)
    if rollout.uses_device_channel:
        yield (
            f"trainer.mode is sync and rollout.weights_channel is {rollout.weights_channel}, which copies from the "
            "learner's device memory: it is empty while the server is awake. Set rollout.weights_channel=auto"
        )
