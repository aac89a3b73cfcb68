"""Weights under DeepSpeed's ZeRO (arXiv 1910.02054, 2101.06840): whole on each rank at stages 1 and 2, where the
optimiser's state, or also gradients, are divided; in parts at stage 3, gathered for each module while it computes.

Trained weights have one dtype there: the value head of a 16-bit critic is rounded like the rest, and its fp32 master is
what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from asyncrl.config.service_sections import LearnerConfig, OptimConfig
from asyncrl.models.published import fitting, load_published, published_parts, published_tensors
from asyncrl_plugins.deepspeed.engine import ZeroEngine, ZeroSettings, load_deepspeed
from asyncrl_plugins.deepspeed.updates import ZeroUpdates, even_part, shape_of
from learner.ranks.group import Ranks
from learner.training.master_weights import LossScale, MasterWeights
from learner.training.sharded_files import ShardedFiles
from learner.training.sharded_state import Stored, TensorPart
from learner.training.updates import Updates

T = TypeVar("T")


class ZeroWhole(ShardedFiles):
    """Stages 1 and 2: each rank has the whole weights, and steps its part of the masters."""

    gathers = False
    gathers_each_call = False

    def __init__(self, settings: ZeroSettings, ranks: Ranks):
        super().__init__(ranks)
        load_deepspeed(settings)
        self._settings = settings
        self._updates: ZeroUpdates | None = None
        self.load_device = settings.device

    def shard(self, model: Any) -> None:
        self.take(model)
        if not self.is_adapted:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(model.dtype)

    def run(self, compute: Callable[[], T]) -> T:
        if self._updates is None or not torch.is_grad_enabled():
            return compute()
        return self._updates.run(compute)

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        assert scale is None, "learner.engine=deepspeed refuses float16"
        self._updates = ZeroUpdates(self._model, self._settings, optim, total_updates, self._ranks, self)
        return self._updates

    def masters(self, model: Any) -> MasterWeights:
        return ZeroMasters(self, model)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in layer.named_parameters()}

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        return published_tensors(self._model)

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | TensorPart:
        """Part of a published weight; a weight that was rounded here is returned as it was loaded."""
        if self._updates is not None and self.dtypes.get(name, tensor.dtype) != tensor.dtype:
            return self._updates.part(tensor)
        return self.divided(self.local(tensor), tensor) if isinstance(tensor, nn.Parameter) else tensor

    def divided(self, local: torch.Tensor, parameter: torch.Tensor) -> TensorPart:
        """The part that this rank writes of something that it has as `local` has it of a parameter."""
        flat = local.detach().reshape(-1)
        size = -(-flat.numel() // self._ranks.size)
        first = min(self._ranks.rank * size, flat.numel())
        return TensorPart(flat[first : first + size], first, parameter.shape)

    @torch.no_grad()
    def set_local(self, local: torch.Tensor, parameter: torch.Tensor, given: torch.Tensor | Stored) -> None:
        """Set that to a saved tensor."""
        local.copy_(given.whole() if isinstance(given, Stored) else given)

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_published(self._model, self._mastered(tensors))

    def _mastered(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        parts = dict(published_parts(self._model))
        for name, tensor in tensors:
            yield name, tensor
            self._set_master(parts[name], tensor)

    def _set(self, tensor: torch.Tensor, given: torch.Tensor | Stored) -> None:
        if isinstance(tensor, nn.Parameter):
            self.set_local(self.local(tensor), tensor, given)
            self._set_master(tensor, given)
        else:  # a buffer
            tensor.copy_(cast(torch.Tensor, given))

    def _set_master(self, tensor: torch.Tensor, given: torch.Tensor | Stored) -> None:
        if self._updates is not None and tensor.requires_grad:
            self._updates.part(tensor).fill(given)

    def changed(self) -> None:
        pass


class ZeroParted(ZeroWhole):
    """Stage 3: each rank has a part of every weight."""

    gathers = True
    gathers_each_call = True

    def __init__(self, settings: ZeroSettings, ranks: Ranks):
        super().__init__(settings, ranks)
        self.load_device = torch.device("cpu")
        self._engine: ZeroEngine | None = None

    def shard(self, model: Any) -> None:
        super().shard(model)
        zero = load_deepspeed(self._settings).zero
        zero.Init(module=model, config_dict_or_path=self._settings.as_deepspeed(0.0))  # one parameter at a time
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._settings.device)

    def run(self, compute: Callable[[], T]) -> T:
        if self._updates is not None:
            return self._updates.run(compute) if torch.is_grad_enabled() else self._updates.engine.run(compute)
        if self._engine is None:  # a model that is only read, such as a reference
            self._engine = ZeroEngine(self._model, self._settings)
        return self._engine.run(compute)

    def local(self, parameter: Any) -> torch.Tensor:
        return parameter.ds_tensor

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        with load_deepspeed(self._settings).zero.GatheredParameters(list(layer.parameters())):
            return {name: weight.detach().clone() for name, weight in layer.named_parameters()}

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        gathered = load_deepspeed(self._settings).zero.GatheredParameters
        for name, tensor in published_parts(self._model):
            with gathered([tensor]):
                yield name, tensor.detach()

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.changed()
        parts = dict(published_parts(self._model))
        outlines = {n: torch.empty(shape_of(p), dtype=p.dtype, device="meta") for n, p in parts.items()}
        for name, whole in fitting(outlines, tensors):
            self._set(parts[name], whole)

    def divided(self, local: torch.Tensor, parameter: torch.Tensor) -> TensorPart:
        return even_part(local.detach(), self._ranks.rank, shape_of(parameter))

    def set_local(self, local: torch.Tensor, parameter: torch.Tensor, given: torch.Tensor | Stored) -> None:
        self.divided(local, parameter).fill(given)

    def changed(self) -> None:
        """Weights that stay whole between steps are gathered again, too."""
        engine = self._updates.engine if self._updates is not None else self._engine
        if engine is not None:
            engine.deepspeed.empty_partition_cache()


class ZeroMasters(MasterWeights):
    """fp32 copies of what this rank has of 16-bit parameters: of the moving reference, which no optimiser steps."""

    def __init__(self, sharding: ZeroWhole, model: nn.Module):
        self._sharding, self._parameters = sharding, dict(model.named_parameters())
        self._trained = {n: sharding.local(p) for n, p in self._parameters.items() if p.requires_grad}
        self._copies = {n: local.detach().float() for n, local in self._trained.items() if local.dtype != torch.float32}

    def state_dict(self) -> dict[str, Any]:
        return {n: self._sharding.divided(copy, self._parameters[n]) for n, copy in self._copies.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._check_names(state.keys(), self._copies.keys(), folder)
        for name, given in state.items():
            self._sharding.set_local(self._copies[name], self._parameters[name], given)


def zero(config: LearnerConfig, device: torch.device, ranks: Ranks) -> ZeroWhole:
    """The placement of `learner.engine: deepspeed`."""
    settings = ZeroSettings.of(config, device)
    return ZeroParted(settings, ranks) if settings.stage == 3 else ZeroWhole(settings, ranks)
