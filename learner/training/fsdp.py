"""Fully sharded weights (FSDP2, arXiv 2304.11277; torch.distributed.fsdp.fully_shard): each rank has 1/size of every
parameter, gradient and optimiser state, and gathers a layer's weights while it computes the layer.

Parts of what is trained are fp32, whatever the model's dtype: they are the master weights. A 16-bit model is gathered
rounded to its dtype, which are the bits that the torch engine computes with, and gradients are summed over ranks in
fp32. What is frozen keeps its dtype. Under an adapter that is the whole base model; the adapter's fp32 parts are
gathered as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
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
from asyncrl.models.export import export_model
from asyncrl.models.gathered_units import gathered_units, is_adapted
from asyncrl.models.published import load_published, published_parts, published_tensors
from learner.ranks.group import Ranks
from learner.training.loss_scale import LossScale
from learner.training.master_weights import MasterWeights
from learner.training.sharded_state import Shards, read_shards, whole_tensors
from learner.training.state_file import missing_parts, put_parts, take_parts
from learner.training.train_engine import Write
from learner.training.updates import MasterUpdates, Updates
from learner.training.whole_files import without_weights

T = TypeVar("T")
_RUN = "compute_with_whole_weights"
"""Method of the model around which FSDP gathers what belongs to no layer: embeddings, norms, output layer."""


class FullySharded:
    """A model in parts on all ranks. Each layer of language model and vision tower is gathered by itself."""

    gathers = True

    def __init__(self, device: torch.device, ranks: Ranks, *, cpu_offload: bool = False):
        """`cpu_offload`: parts, gradients and optimiser state stay in host memory, and the optimiser steps there."""
        self.load_device = torch.device("cpu")
        self._device, self._ranks, self._cpu_offload = device, ranks, cpu_offload

    def shard(self, model: Any) -> None:
        self._model = model
        self._dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        whole = hasattr(model, "save_pretrained") and not is_adapted(model)
        self._skeleton = without_weights(model) if whole else None
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
        host = init_device_mesh("cpu", (self._ranks.size,))
        self._shards = Shards(host, cast(dist.ProcessGroup, dist.new_group(backend="gloo")))

    def run(self, compute: Callable[[], T]) -> T:
        return getattr(self._model, _RUN)(compute)

    def updates(self, optim: OptimConfig, total_updates: int, scale: LossScale | None = None) -> Updates:
        return MasterUpdates(self._model, self, optim, total_updates, scale)

    def masters(self, model: Any) -> MasterWeights:
        return ShardedMasters(self, model, self._dtypes)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        self.changed()
        names = {id(weight): name for name, weight in self._model.state_dict(keep_vars=True).items()}
        return {
            name: self.whole(weight.detach().to(self._dtypes[names[id(weight)]]))
            for name, weight in layer.named_parameters()
        }

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

    @torch.no_grad()
    def part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows of the first dimension as FSDP divides them: as many for each rank, for the last ones what is left."""
        assert isinstance(like, DTensor)
        made = cast(DTensor, torch.empty_like(like))
        rows = -(-whole.shape[0] // self._ranks.size)
        divided = isinstance(whole, DTensor)
        made.to_local().copy_(
            whole.to_local() if divided else whole[self._ranks.rank * rows : (self._ranks.rank + 1) * rows]
        )
        return made

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        names = {id(t): name for name, t in published_parts(self._model)}
        aliases = {name: names[id(t)] for name, t in self._model.state_dict(keep_vars=True).items()}
        state = self._weights(copies=copies)

        def write(folder: Path) -> None:
            """Parts first, and then rank 0 the folder, from a file of whole tensors on the disk."""
            parts_in = folder.with_name(f".{folder.name}.parts")
            if self._ranks.leads:
                shutil.rmtree(parts_in, ignore_errors=True)  # of a process that was killed
            dist.barrier(self._shards.group)
            _, parts = take_parts(state, DTensor)
            self._shards.write_whole(parts_in, parts)
            if self._ranks.leads:
                whole = {**state, **whole_tensors(parts_in)}
                export_model(self._skeleton, processor, folder, {name: whole[own] for name, own in aliases.items()})
                shutil.rmtree(parts_in)

        return write

    def _weights(self, *, copies: bool) -> dict[str, torch.Tensor]:
        """This rank's parts by their published names, rounded to the model's dtype."""
        self.changed()
        found: dict[str, torch.Tensor] = {}
        for name, tensor in published_parts(self._model):
            rounded = tensor.detach().to(self._dtypes.get(name, tensor.dtype))
            found[name] = self._shards.kept(rounded, copies=copies and rounded.dtype == tensor.dtype)
        return found

    def weights_files(self, name: str, *, copies: bool) -> Write:
        return self._write_state(self._weights(copies=copies), str(Path(name).with_suffix(".pt")))

    @torch.no_grad()
    def load_weights(self, file: Path) -> None:
        self.changed()
        own = self._model.state_dict(keep_vars=True)

        def take(name: str, tensor: torch.Tensor) -> None:
            target = own[name]
            target.copy_(self.part(tensor, target) if isinstance(target, DTensor) else tensor)

        if not file.exists():
            for name, tensor in self.read_state(file.with_suffix(".pt")).items():
                take(name, tensor)
            return
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                take(name, opened.get_tensor(name))

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write:
        return self._write_state(
            tree_map_only(torch.Tensor, lambda tensor: self._shards.kept(tensor, copies=copies), state), name
        )

    def _write_state(self, state: Any, name: str) -> Write:
        """Rank 0 writes the file, and all write their parts beside it."""
        record, parts = take_parts(state, DTensor)

        def write(folder: Path) -> None:
            if parts:
                self._shards.write((folder / name).with_suffix(""), parts)
            if self._ranks.leads:
                torch.save(record, folder / name)

        return write

    def read_state(self, file: Path) -> Any:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        found = {name: self._shards.empty(like) for name, like in missing_parts(state).items()}
        if found:
            read_shards(file.with_suffix(""), found)
        return put_parts(state, found)

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
