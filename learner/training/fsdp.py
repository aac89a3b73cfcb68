"""Fully sharded weights (FSDP2, arXiv 2304.11277; torch.distributed.fsdp.fully_shard): each rank has 1/size of every
parameter, gradient and optimiser state, and gathers a layer's weights while it computes the layer.

Parts of what is trained are fp32, whatever the model's dtype: they are the master weights. A 16-bit model is gathered
rounded to its dtype, which are the bits that the torch engine computes with, and gradients are summed over ranks in
fp32. What is frozen keeps its dtype. Under an adapter that is the whole base model; the adapter's fp32 parts are
gathered as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_model
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

from asyncrl.config.sections import OptimConfig
from asyncrl.models.gathered_units import gathered_units, is_adapted
from asyncrl.models.published import load_published, published_parts, published_tensors
from learner.ranks.group import Ranks
from learner.training.loss_scale import LossScale
from learner.training.master_weights import MasterWeights
from learner.training.updates import MasterUpdates, Updates

T = TypeVar("T")
_RUN = "compute_with_whole_weights"
"""Method of the model around which FSDP gathers what belongs to no layer: embeddings, norms, output layer."""


class FullySharded:
    """A model in parts on all ranks. Each layer of language model and vision tower is gathered by itself."""

    def __init__(self, device: torch.device, ranks: Ranks, *, cpu_offload: bool = False):
        """`cpu_offload`: parts, gradients and optimiser state stay in host memory, and the optimiser steps there."""
        self.load_device = torch.device("cpu")
        self._device, self._ranks, self._cpu_offload = device, ranks, cpu_offload

    def shard(self, model: Any) -> None:
        self._model = model
        self._dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        whole = hasattr(model, "save_pretrained") and not is_adapted(model)
        self._skeleton = _without_weights(model) if whole else None
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
                    parameter.data = parameter.data.float()
            fully_shard(module, mesh=mesh, mp_policy=kept if dtype == torch.float32 else mixed, offload_policy=offload)
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)  # losses are divided by counts over all ranks
            sharded.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, _RUN)

    def run(self, compute: Callable[[], T]) -> T:
        return getattr(self._model, _RUN)(compute)

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        return MasterUpdates(self._model, self, optim, total_updates, scale)

    def masters(self, model: Any) -> MasterWeights:
        return ShardedMasters(self, model, self._dtypes)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.changed()
        for name, tensor in published_parts(self._model):
            yield name, self.whole(tensor.detach().to(self._dtypes.get(name, tensor.dtype)))  # an adapter's are fp32

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.changed()
        own = dict(published_tensors(self._model))
        load_published(self._model, ((n, self.part(t, own[n]) if n in own else t) for n, t in tensors))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self.whole(tensor)
        return _in_host_memory(whole) if self._ranks.leads else torch.empty(0)

    @torch.no_grad()
    def part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows of the first dimension as FSDP divides them: as many for each rank, for the last ones what is left."""
        assert isinstance(like, DTensor)
        rows, made = -(-whole.shape[0] // self._ranks.size), cast(DTensor, torch.empty_like(like))
        made.to_local().copy_(whole[self._ranks.rank * rows : (self._ranks.rank + 1) * rows])
        return made

    def save_weights(self, file: Path) -> None:
        whole = self._gather()
        if self._ranks.leads:
            save_model(cast(nn.Module, _Weights(whole)), str(file))

    @torch.no_grad()
    def load_weights(self, file: Path) -> None:
        self.changed()
        own = self._model.state_dict(keep_vars=True)
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                whole = opened.get_tensor(name)
                target = own[name]
                target.copy_(self.part(whole, target) if isinstance(target, DTensor) else whole)

    def to_save(self) -> Any:
        whole = self._gather()
        return _Exportable(self._skeleton, whole) if self._ranks.leads else None

    def changed(self) -> None:
        cast(FSDPModule, self._model).reshard()

    def _gather(self) -> dict[str, torch.Tensor]:
        """All weights on the rank that writes, in host memory, under all their names; tied ones are one tensor."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self.published():
            if self._ranks.leads:
                whole[name] = _in_host_memory(tensor)
        if not self._ranks.leads:
            return whole
        names = {id(t): name for name, t in published_parts(self._model)}
        return {name: whole[names[id(t)]] for name, t in self._model.state_dict(keep_vars=True).items()}


class ShardedMasters(MasterWeights):
    """The parts themselves, which are fp32. Of a 16-bit model they are saved as the torch engine saves its masters."""

    def __init__(self, sharding: FullySharded, model: nn.Module, dtypes: Mapping[str, torch.dtype]):
        super().__init__(model)
        self._sharding = sharding
        self._rounded = {name: p for name, p in self._trained.items() if dtypes[name] != torch.float32}
        self._computed_in = dtypes

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        return self._computed_in

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: self._sharding.kept(p.detach()) for name, p in self._rounded.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._check_names(state.keys(), self._rounded.keys(), folder)
        for name, whole in state.items():
            self._rounded[name].copy_(self._sharding.part(whole, self._rounded[name]))


class _Weights:
    """A state that is saved as if it were a module's."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        self._state = state

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._state


class _Exportable:
    """A model without weights, and its weights."""

    def __init__(self, skeleton: Any, state: Mapping[str, torch.Tensor]):
        self._skeleton, self._state = skeleton, state

    def save_pretrained(self, folder: Path) -> None:
        self._skeleton.save_pretrained(folder, state_dict=dict(self._state))


def _in_host_memory(whole: torch.Tensor) -> torch.Tensor:
    """The tensor with memory of its own: parts of unequal size are gathered into more than they fill."""
    host = whole.cpu()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _call(compute: Callable[[], T]) -> T:
    """Views are copied: FSDP warns of hooks that an in-place operation on them would lose."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor._base is not None else tensor, compute())


def _without_weights(model: Any) -> Any:
    """The same model on the meta device: it knows how its family's files are written."""
    config = copy(model.config)
    with torch.device("meta"):
        skeleton = type(model)._from_config(config, dtype=model.dtype)
    skeleton.generation_config = model.generation_config
    skeleton._weight_conversions = getattr(model, "_weight_conversions", None)  # names in the files that it came from
    return skeleton
