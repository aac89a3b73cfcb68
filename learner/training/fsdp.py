"""Fully sharded weights (FSDP2, arXiv 2304.11277; torch.distributed.fsdp.fully_shard): each rank has 1/size of every
parameter, gradient and optimiser state, and gathers a layer's weights while it computes the layer.

Parts of what is trained are fp32, whatever the model's dtype: they are the master weights. A 16-bit model is gathered
rounded to its dtype, which are the bits that the torch engine computes with, and gradients are summed over ranks in
fp32. What is frozen keeps its dtype. Under an adapter that is the whole base model; the adapter's fp32 parts are
gathered as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from asyncrl.config.service_sections import LearnerConfig, OptimConfig
from asyncrl.models.parts import gathered_units
from asyncrl.models.published import load_published, published_parts, published_tensors
from learner.ranks.group import Ranks
from learner.training.master_weights import LossScale, MasterWeights
from learner.training.sharded_files import ShardedFiles
from learner.training.sharded_state import Stored, TensorPart
from learner.training.updates import MasterUpdates, Updates

T = TypeVar("T")
_RUN = "compute_with_whole_weights"
"""Method of the model around which FSDP gathers what belongs to no layer: embeddings, norms, output layer."""


class FullySharded(ShardedFiles):
    """A model in parts on all ranks. Each layer of language model and vision tower is gathered by itself."""

    gathers = True

    def __init__(self, device: torch.device, ranks: Ranks, *, cpu_offload: bool = False):
        """`cpu_offload`: parts, gradients and optimiser state stay in host memory, and the optimiser steps there."""
        super().__init__(ranks)
        self.load_device = torch.device("cpu")
        self._device, self._cpu_offload = device, cpu_offload

    def shard(self, model: Any) -> None:
        self.take(model)
        mesh = init_device_mesh(self._device.type, (self._ranks.size,))
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self._cpu_offload else OffloadPolicy()
        for module, dtype in list(gathered_units(model)):
            # Inputs stay as the layers before have made them: casts of rotary tables would cost bits.
            kept = MixedPrecisionPolicy(cast_forward_inputs=False)
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            if module is model:
                setattr(module, _RUN, _call)
            for parameter in module.parameters():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(self._device).float()  # FSDP puts it there: not wide on the host
            fully_shard(module, mesh=mesh, mp_policy=kept if dtype == torch.float32 else mixed, offload_policy=offload)
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)  # losses are divided by counts over all ranks
            sharded.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, _RUN)

    def run(self, compute: Callable[[], T]) -> T:
        def with_wide_gradients() -> T:
            # The output layer has a gradient from each chunk of tokens, which autograd adds up in this dtype. What
            # belongs to no layer is whole here; FSDP wants one dtype for all of it.
            for parameter in self._model.parameters() if torch.is_grad_enabled() else ():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.grad_dtype = torch.float32
            return compute()

        return getattr(self._model, _RUN)(with_wide_gradients)

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        return MasterUpdates(self._model, self, optim, total_updates, scale)

    def masters(self, model: Any) -> MasterWeights:
        return ShardedMasters(self, model, self.dtypes)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        self.changed()
        names = {id(weight): name for name, weight in self._model.state_dict(keep_vars=True).items()}
        return {
            name: self.whole(weight.detach().to(self.dtypes[names[id(weight)]]))
            for name, weight in layer.named_parameters()
        }

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.changed()
        for name, tensor in published_parts(self._model):
            yield name, self.whole(self.part_of(name, tensor))

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.changed()
        own = dict(published_tensors(self._model))
        load_published(self._model, ((n, self.part(t, own[n]) if n in own else t) for n, t in tensors))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, whole: torch.Tensor | Stored, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(like)
        assert isinstance(made, DTensor)
        TensorPart.rows(made).fill(whole)
        return made

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rounded to the model's dtype; an adapter's are fp32."""
        return tensor.detach().to(self.dtypes.get(name, tensor.dtype))

    def _set(self, tensor: torch.Tensor, given: torch.Tensor | Stored) -> None:
        if isinstance(tensor, DTensor):
            TensorPart.rows(tensor).fill(given)
        else:  # a buffer
            tensor.copy_(cast(torch.Tensor, given))

    def changed(self) -> None:
        cast(FSDPModule, self._model).reshard()


class ShardedMasters(MasterWeights):
    """The parts themselves, which are fp32. Those of a 16-bit model are saved under the torch engine's names."""

    def __init__(self, sharding: FullySharded, model: nn.Module, dtypes: Mapping[str, torch.dtype]):
        super().__init__(model)
        self._sharding = sharding
        self._rounded = {name: p for name, p in self._trained.items() if dtypes[name] != torch.float32}
        self._computed_in = dtypes

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        return self._computed_in

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._rounded.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._check_names(state.keys(), self._rounded.keys(), folder)
        for name, whole in state.items():
            self._rounded[name].copy_(self._sharding.part(whole, self._rounded[name]))


def _call(compute: Callable[[], T]) -> T:
    """Views are copied: FSDP warns of hooks that an in-place operation on them would lose."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor._base is not None else tensor, compute())


def fully_sharded(config: LearnerConfig, device: torch.device, ranks: Ranks) -> FullySharded:
    """The placement of `learner.engine: fsdp2`."""
    return FullySharded(device, ranks, cpu_offload=config.cpu_offload)
