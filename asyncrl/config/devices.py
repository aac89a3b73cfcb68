"""What `learner.device` and `rollout.device` mean. Names only: what a machine has is asked where torch is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


def meant_device(name: str, *, cuda: bool) -> str:
    """`auto` is the first CUDA device where there are some (`cuda`), else the CPU; `cuda` is the first one."""
    if name == "auto" and not cuda:
        return "cpu"
    return "cuda:0" if name in ("auto", "cuda") else name


def same_device(config: RunConfig, *, cuda: bool) -> bool:
    """Do learner and rollout server work on one? Who names a CUDA device means a machine that has some."""
    names = (config.learner.device, config.rollout.device)
    cuda = cuda or any(name.startswith("cuda") for name in names)
    learner, rollout = (meant_device(name, cuda=cuda) for name in names)
    return learner == rollout


def device_problems(config: RunConfig) -> list[str]:
    """One line for each name that is no device, with its fix."""
    names = {"learner.device": config.learner.device, "rollout.device": config.rollout.device}
    return [
        f"{key} is {name!r}, which is no device. Set {key}=auto, cpu, cuda, or cuda:1 for the second GPU"
        for key, name in names.items()
        if not _NAME.fullmatch(name)
    ]


def two_devices(config: RunConfig) -> str:
    """Why sync mode refuses devices that differ, and the fix."""
    return (
        f"trainer.mode is sync, but learner.device is {config.learner.device} and rollout.device is "
        f"{config.rollout.device}: on two devices nobody needs to sleep. Set both to the same, or trainer.mode=async"
    )
