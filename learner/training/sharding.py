"""The placement of a model's weights: whole on one device, or in parts on all ranks (fsdp.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import load_model, save_model

from asyncrl.config.sections import LearnerConfig, OptimConfig
from asyncrl.models.published import load_published, published_tensors
from learner.ranks.group import Ranks
from learner.training.loss_scale import LossScale
from learner.training.master_weights import MasterWeights
from learner.training.offloaded_masters import OffloadedMasters
from learner.training.updates import MasterUpdates, Updates

T = TypeVar("T")


class Sharding(Protocol):
    """What differs between a model that is whole and one in parts. Whatever returns whole tensors is a collective."""

    load_device: torch.device
    """Where the model is loaded, before `shard`."""

    def shard(self, model: Any) -> None:
        """Take the model as it was loaded; from now on its parameters are this rank's parts."""
        ...

    def run(self, compute: Callable[[], T]) -> T:
        """Compute with whole weights. Tensors with a gradient are returned as such, or in tuples and dicts."""
        ...

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        """Gradients and optimiser of the model's trained parameters."""
        ...

    def masters(self, model: Any) -> MasterWeights:
        """fp32 masters of what `local` has of its trained parameters."""
        ...

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter."""
        ...

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors as servers get them, one at a time."""
        ...

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy published tensors into the model. Raises ValueError where names or shapes differ."""
        ...

    def save_weights(self, file: Path) -> None:
        """Write all weights as safetensors; one rank writes."""
        ...

    def load_weights(self, file: Path) -> None: ...

    def to_save(self) -> Any:
        """A model that `save_pretrained` can write, on the rank that writes, else None."""
        ...

    def changed(self) -> None:
        """Forget whole weights that are kept from the last computation: the parts have changed, or will be read."""
        ...


class OneDevice:
    """The whole model on the device of the one process."""

    def __init__(self, device: torch.device, *, cpu_offload: bool = False):
        """`cpu_offload`: masters, gradients and optimiser state are in host memory, and the optimiser steps there."""
        self.load_device = device
        self._cpu_offload = cpu_offload

    def shard(self, model: Any) -> None:
        self._model = model

    def run(self, compute: Callable[[], T]) -> T:
        return compute()

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        return MasterUpdates(self._model, self, optim, total_updates, scale)

    def masters(self, model: Any) -> MasterWeights:
        return OffloadedMasters(model, self.load_device) if self._cpu_offload else MasterWeights(model)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        return published_tensors(self._model)

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_published(self._model, tensors)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return whole

    def save_weights(self, file: Path) -> None:
        save_model(self._model, str(file))

    def load_weights(self, file: Path) -> None:
        load_model(self._model, file)

    def to_save(self) -> Any:
        return self._model

    def changed(self) -> None:
        pass


def make_sharding(config: LearnerConfig, device: torch.device, ranks: Ranks) -> Sharding:
    """The placement of `learner.engine`."""
    if config.engine == "torch":
        return OneDevice(device, cpu_offload=config.cpu_offload)
    from learner.training.fsdp import FullySharded  # torch.distributed: not for a learner of one process

    return FullySharded(device, ranks, cpu_offload=config.cpu_offload)
