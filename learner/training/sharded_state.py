"""Sharded files of a checkpoint: each rank writes and reads its parts of large tensors, and none holds a whole model.

A part is a range of the flattened tensor, whatever has divided it: rows (FSDP), ranges of a parameter (ZeRO 3) or of
all parameters of a group in a row (ZeRO 1 and 2). PyTorch's distributed checkpoints (DCP) write the parts as 1-D
tensors into safetensors files, whose headers say where each belongs; any number of ranks, and a process without ranks,
reads from them what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from asyncrl.devices.host_copies import host_copy, to_host

FILE_BYTES = 128 << 20
"""A rank's parts are written in files of about this size, each of which is put together in memory first."""


@dataclass(frozen=True)
class TensorPart:
    """Part of a tensor on one rank."""

    elements: torch.Tensor
    """[n] of the flattened tensor, in its order; none where the rank has nothing of it."""
    first: int
    """Place of the first."""
    shape: torch.Size
    """Shape of the whole tensor."""

    @staticmethod
    def rows(tensor: DTensor) -> TensorPart:
        """The part of a tensor whose rows FSDP has divided: as many for each rank, for the last ones what is left."""
        mesh, shape = tensor.device_mesh, tensor.shape
        rows = -(-shape[0] // mesh.size())
        first = min(mesh.get_local_rank() * rows, shape[0])
        return TensorPart(tensor.to_local().detach().view(-1), first * shape[1:].numel(), shape)

    @torch.no_grad()
    def fill(self, given: torch.Tensor | Stored) -> None:
        """Set the elements to those of a whole tensor, or of one in sharded files."""
        last = self.first + self.elements.numel()
        found = given.range(self.first, last) if isinstance(given, Stored) else given.reshape(-1)[self.first : last]
        self.elements.copy_(found)


@dataclass(frozen=True)
class Stored:
    """A tensor in sharded files, mapped: the kernel reads what is used, and may forget it again."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    parts: list[tuple[int, torch.Tensor]]
    """Places of first elements, and [n] elements."""

    def range(self, first: int, last: int) -> torch.Tensor:
        """[last - first] elements of the flattened tensor. Raises ValueError where some are in no file."""
        found, filled = torch.empty(last - first, dtype=self.dtype), 0
        for start, part in self.parts:
            low, high = max(first, start), min(last, start + part.numel())
            if low < high:
                found[low - first : high - first] = part[low - start : high - start]
                filled += high - low
        if filled != last - first:
            raise ValueError(f"of {self.name} {filled} of the elements {first} to {last} are in the checkpoint's files")
        return found

    def whole(self) -> torch.Tensor:
        return self.range(0, self.shape.numel()).view(self.shape)


def kept(value: torch.Tensor | TensorPart, *, copies: bool) -> torch.Tensor | TensorPart:
    """A tensor, or this rank's part of it, for `write_parts`: in host memory as it is now, and not only until the next
    step where `copies`."""
    if isinstance(value, TensorPart):
        elements = value.elements.detach()
        return replace(value, elements=host_copy(elements) if copies else to_host(elements))
    return host_copy(value) if copies else value


def write_parts(
    folder: Path, parts: Mapping[str, TensorPart], group: dist.ProcessGroup, *, puts_together: bool = False
) -> None:
    """Write the parts of all ranks, which all call this, on threads of their own if they like. `puts_together`: rank 0
    then puts them together into files of whole tensors, flattened, one at a time.

    Raises what any rank has met, on all of them.
    """
    numbers = _file_numbers(parts, group)
    writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True, enable_consolidation=puts_together)
    save(cast(Any, dict(parts)), storage_writer=writer, planner=_Planner(), process_group=group)


class _Planner(DefaultSavePlanner):
    """Plans to write each part that has elements as a range of a 1-D tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, part) for name, part in self.state_dict.items() if part.elements.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].elements


def _item(name: str, part: TensorPart) -> WriteItem:
    place, size = torch.Size([part.first]), part.elements.shape
    properties = TensorProperties.create_from_tensor(part.elements)
    data = TensorWriteData(ChunkStorageMetadata(place, size), properties, torch.Size([part.shape.numel()]))
    return WriteItem(MetadataIndex(name, place), WriteItemType.SHARD, tensor_data=data)


def _file_numbers(parts: Mapping[str, TensorPart], group: dist.ProcessGroup) -> dict[str, int]:
    """Numbers of the files that tensors are in, the same on all ranks: a next one where one of the ranks' is full."""
    mine = torch.tensor([part.elements.nbytes for part in parts.values()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    numbers: dict[str, int] = {}
    number, filled = 1, torch.zeros(len(every), dtype=torch.int64)
    for name, sizes in zip(parts, torch.stack(every, dim=1), strict=True):
        if filled.any() and (filled + sizes).max() > FILE_BYTES:
            number, filled = number + 1, torch.zeros_like(filled)
        numbers[name] = number
        filled += sizes
    return numbers


def stored_tensors(folder: Path, outlines: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """Tensors of these names, shapes and dtypes, written by any number of ranks."""
    found = {name: Stored(name, like.shape, like.dtype, []) for name, like in outlines.items()}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name, part in _tensors(opened):
                if name in found:
                    first, *_ = places[name]["saved_offsets"]
                    # Also where a file has rows of an n-D tensor: they are a range of the flattened one.
                    found[name].parts.append((first * prod(part.shape[1:]), part.reshape(-1)))
    return found


def joined_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that rank 0 has joined, mapped: names and flattened tensors."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            yield from _tensors(opened)


def _tensors(opened: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in opened.keys():  # noqa: SIM118
        yield name, opened.get_tensor(name)
