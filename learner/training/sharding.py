"""The placement of a model's weights: whole on one device, or in parts on all ranks (fsdp.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from asyncrl.config.parts import LEARNER_ENGINES
from asyncrl.config.service_sections import LearnerConfig, OptimConfig, Optimizer
from asyncrl.devices.host_copies import host_copy
from asyncrl.models.export import export_model
from asyncrl.models.published import load_published, published_tensors
from asyncrl.plugins import implementation
from learner.ranks.group import Ranks
from learner.training.master_weights import LossScale, MasterWeights
from learner.training.offloaded_masters import OffloadedMasters
from learner.training.sharded_files import Write, read_whole_state
from learner.training.updates import MasterUpdates, Updates

T = TypeVar("T")


class Sharding(Protocol):
    """Placement of a model, whole or divided. Whatever returns whole tensors is a collective."""

    load_device: torch.device
    """Device for loading the model, before `shard`."""
    gathers: bool
    """True where weights are gathered while they compute: all ranks then compute the same modules, as often."""
    gathers_each_call: bool
    """True where that holds within layers, too."""

    def shard(self, model: Any) -> None:
        """Take the model as it was loaded; from now on its parameters are this rank's parts."""
        ...

    def run(self, compute: Callable[[], T]) -> T:
        """Compute with whole weights. Tensors with a gradient are returned as such, or in tuples and dicts."""
        ...

    def reduce_gradients(self, now: bool) -> None:
        """Sum gradients over ranks in the next backward pass, or in a later one (`TorchEngine.reduces_once`)."""
        ...

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        """Gradients and optimiser of the model's trained parameters."""
        ...

    def masters(self, model: Any) -> MasterWeights:
        """fp32 masters of what `local` has of its trained parameters."""
        ...

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Part of a parameter on this rank."""
        ...

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of this process's part of a parameter, or of a tensor that is divided like one."""
        ...

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        """Whole weights of one of the model's layers, copied where it is in parts, as they compute; without
        gradient."""
        ...

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors as servers get them, one at a time."""
        ...

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy published tensors into the model. Raises ValueError where names or shapes differ."""
        ...

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        """The model as it is now, as a Hugging Face folder."""
        ...

    def weights_files(self, name: str, *, copies: bool) -> Write:
        """All weights as they are now, in a file of torch; what is divided lies beside it."""
        ...

    def load_weights(self, file: Path) -> None:
        """Read what `weights_files` of any placement has written."""
        ...

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write:
        """A nested state of tensors and numbers as it is now, in a file of torch; what is divided lies beside it."""
        ...

    def read_state(self, file: Path) -> Any:
        """Optimiser state from a file, in host memory, for any earlier placement: of divided tensors, whole ones, or
        their places."""
        ...

    def changed(self) -> None:
        """Forget whole weights that are kept from the last computation: the parts have changed, or will be read."""
        ...


class OneDevice:
    """The whole model on the device of the one process."""

    gathers = False
    gathers_each_call = False

    def __init__(self, device: torch.device, *, cpu_offload: bool = False, optimizer: Optimizer = "adamw"):
        """`cpu_offload`: masters, gradients and optimiser state are in host memory, and the optimiser steps there."""
        self.load_device = device
        self._cpu_offload = cpu_offload
        self._optimizer: Optimizer = optimizer

    def shard(self, model: Any) -> None:
        self._model = model

    def run(self, compute: Callable[[], T]) -> T:
        return compute()

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        return MasterUpdates(self._model, self, optim, total_updates, scale, self._optimizer)

    def masters(self, model: Any) -> MasterWeights:
        return OffloadedMasters(model, self.load_device) if self._cpu_offload else MasterWeights(model)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in layer.named_parameters()}

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        return published_tensors(self._model)

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_published(self._model, tensors)

    def norm(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def divided(self, local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return local

    def part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return whole

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        state = _copied(self._model) if copies else None
        return lambda folder: export_model(self._model, processor, folder, state)

    def weights_files(self, name: str, *, copies: bool) -> Write:
        return self.state_files(dict(published_tensors(self._model)), name, copies=copies)

    @torch.no_grad()
    def load_weights(self, file: Path) -> None:
        own = dict(published_tensors(self._model))
        for name, tensor in self.read_state(file).items():
            own[name].copy_(tensor)

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write:
        kept = tree_map_only(torch.Tensor, host_copy, state) if copies else state
        return lambda folder: torch.save(kept, folder / name)

    def read_state(self, file: Path) -> Any:
        return read_whole_state(file)

    def changed(self) -> None:
        pass


def _copied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights in host memory, under all their names; tied ones are one tensor."""
    copies: dict[int, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for tensor in state.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = host_copy(tensor)
    return {name: copies[id(tensor)] for name, tensor in state.items()}


def one_device(config: LearnerConfig, device: torch.device, ranks: Ranks) -> OneDevice:
    """The placement of `learner.engine: torch`."""
    return OneDevice(device, cpu_offload=config.cpu_offload, optimizer=config.optimizer)


def make_sharding(config: LearnerConfig, device: torch.device, ranks: Ranks) -> Sharding:
    """The placement of `learner.engine`, whose module is imported only where it is chosen."""
    return implementation(LEARNER_ENGINES[config.engine].implementation)(config, device, ranks)
