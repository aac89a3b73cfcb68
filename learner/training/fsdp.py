"""Fully sharded weights (FSDP2, arXiv 2304.11277; torch.distributed.fsdp.fully_shard): each rank has 1/size of every
parameter, gradient and optimiser state, and gathers a layer's weights while it computes the layer.

Parts of what is trained are fp32, whatever the model's dtype: they are the master weights. A 16-bit model is gathered
rounded to its dtype, which are the bits that the torch engine computes with, and gradients are summed over ranks in
fp32, after each micro-batch or, where whole ones have room, once in an update. What is frozen keeps its dtype. Under an
adapter that is the whole base model; the adapter's fp32 parts are gathered as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
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
from asyncrl.models.published import fitting, published_parts
from learner.ranks.group import Ranks
from learner.training.master_weights import LossScale, MasterWeights
from learner.training.sharded_files import ShardedFiles
from learner.training.sharded_state import Stored, TensorPart
from learner.training.updates import MasterUpdates, Updates

T = TypeVar("T")
GATHERED = 1 << 26
"""Bytes of whole tensors that one collective gathers: one for each tensor would wait more than it sends."""
_RUN = "compute_with_whole_weights"
"""Method of the model around which FSDP gathers what belongs to no layer: embeddings, norms, output layer."""


class FullySharded(ShardedFiles):
    """A model in parts on all ranks. Each layer of language model and vision tower is gathered by itself."""

    gathers = True
    gathers_each_call = False

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
            sharded.unshard()  # else torch finds no place for gradients that wait, in a unit that no pass has gathered
            for parameter in module.parameters() if module is model else ():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    # The output layer has a gradient from each chunk of tokens, which autograd adds up in this dtype.
                    # What belongs to no layer is whole here; FSDP wants one dtype for all of it.
                    parameter.grad_dtype = torch.float32
            sharded.reshard()
        register_fsdp_forward_method(model, _RUN)

    def run(self, compute: Callable[[], T]) -> T:
        return getattr(self._model, _RUN)(compute)

    def reduce_gradients(self, now: bool) -> None:
        model = cast(FSDPModule, self._model)
        model.set_requires_gradient_sync(now)  # those that wait add up in fp32: FSDP takes reduce_dtype for that
        model.set_reshard_after_backward(now, recurse=False)  # what belongs to no layer is whole in each pass anyway

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        return MasterUpdates(self._model, self, optim, total_updates, scale)

    def masters(self, model: Any) -> MasterWeights:
        return ShardedMasters(self, model, self.dtypes)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.in_memory(parameter).detach()

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def norm(self, local: torch.Tensor) -> torch.Tensor:
        return local.new_tensor(math.sqrt(self._ranks.total(float(local) ** 2)))

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        names = {id(weight): name for name, weight in self._model.state_dict(keep_vars=True).items()}
        own = {names[id(weight)]: name for name, weight in layer.named_parameters()}
        wholes = self._wholes((names[id(weight)], weight) for weight in layer.parameters())
        return {own[name]: whole for name, whole in wholes}

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._wholes(published_parts(self._model))

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.changed()
        parts = dict(published_parts(self._model))
        outlines = {n: torch.empty(p.shape, dtype=self.dtypes.get(n, p.dtype), device="meta") for n, p in parts.items()}
        for name, whole in fitting(outlines, tensors):
            self._set(parts[name], whole)

    def _wholes(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """All of each parameter and buffer, as it computes: many parts by one collective."""
        self.changed()
        waiting: dict[str, TensorPart] = {}
        for name, tensor in named:
            part = self.part_of(name, tensor)
            # Sizes of whole tensors: those of parts differ between ranks, which must all cut at the same places.
            held = [other.shape.numel() * other.elements.itemsize for other in waiting.values()]
            dtypes = {other.elements.dtype for other in waiting.values()}
            if not isinstance(part, TensorPart) or sum(held) > GATHERED or dtypes - {part.elements.dtype}:
                yield from self._gathered(waiting)
                waiting = {}
            if isinstance(part, TensorPart):
                waiting[name] = part
            else:
                yield name, part
        yield from self._gathered(waiting)

    def _gathered(self, parts: Mapping[str, TensorPart]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of parts of one dtype."""
        if not parts:
            return
        size = self._ranks.size
        lengths = [-(-part.shape[0] // size) * part.shape[1:].numel() for part in parts.values()]
        own = [
            nn.functional.pad(p.elements, (0, n - len(p.elements)))
            for p, n in zip(parts.values(), lengths, strict=True)
        ]
        sent = torch.cat(own)
        gathered = sent.new_empty(size, len(sent))
        dist.all_gather_into_tensor(gathered.view(-1), sent)
        for (name, part), of_ranks in zip(parts.items(), gathered.split(lengths, 1), strict=True):
            yield name, of_ranks.reshape(-1)[: part.shape.numel()].view(part.shape)

    def part(self, whole: torch.Tensor | Stored, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(self.local(like))
        self.divided(made, like).fill(whole)
        return made

    def divided(self, local: torch.Tensor, parameter: torch.Tensor) -> TensorPart:
        return replace(TensorPart.rows(cast(DTensor, parameter)), elements=local.view(-1))

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | TensorPart:
        """Rounded to the model's dtype; an adapter's are fp32."""
        part = self.local(tensor).to(self.dtypes.get(name, tensor.dtype))
        return self.divided(part, tensor) if isinstance(tensor, DTensor) else part

    def _set(self, tensor: torch.Tensor, given: torch.Tensor | Stored) -> None:
        if isinstance(tensor, DTensor):
            TensorPart.rows(tensor).fill(given)
        else:  # a buffer
            tensor.copy_(cast(torch.Tensor, given))

    def changed(self) -> None:
        cast(FSDPModule, self._model).reshard()


class ShardedMasters(MasterWeights):
    """The parts themselves, which are fp32. Those of a 16-bit model are saved under the torch engine's names.

    They are stepped as this rank's tensors: nothing in a step but its norm is between ranks.
    """

    def __init__(self, sharding: FullySharded, model: nn.Module, dtypes: Mapping[str, torch.dtype]):
        super().__init__(model)
        self._sharding = sharding
        self._rounded = {name: p for name, p in self._trained.items() if dtypes[name] != torch.float32}
        self._computed_in = dtypes
        self._parts = {name: sharding.local(p) for name, p in self._trained.items()}

    def stepped(self) -> list[torch.Tensor]:
        for name, part in self._parts.items():
            part.data = self._sharding.local(self._trained[name])  # FSDP may have put it elsewhere
        return list(self._parts.values())

    def take_gradients(self) -> None:
        for name, part in self._parts.items():
            parameter: Any = self._trained[name]
            part.grad, parameter.grad = self._sharding.in_memory(parameter.grad), None

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        return self._computed_in

    def state_dict(self) -> dict[str, Any]:
        return {name: TensorPart.rows(cast(Any, p)) for name, p in self._rounded.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._check_names(state.keys(), self._rounded.keys(), folder)
        for name, whole in state.items():
            TensorPart.rows(cast(Any, self._rounded[name])).fill(whole)


def _call(compute: Callable[[], T]) -> T:
    """Views are copied: FSDP warns of hooks that an in-place operation on them would lose."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor._base is not None else tensor, compute())


def fully_sharded(config: LearnerConfig, device: torch.device, ranks: Ranks) -> FullySharded:
    """The placement of `learner.engine: fsdp2`."""
    return FullySharded(device, ranks, cpu_offload=config.cpu_offload)
