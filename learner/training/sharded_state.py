"""Sharded files of a checkpoint: each rank writes and reads its parts of large tensors, and none holds a whole model.

They are safetensors files with each part's place in their headers, written and read by PyTorch's distributed
checkpoints (DCP), which give any number of ranks, and a process without ranks, the parts that it asks for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from asyncrl.models.host_copies import host_copy, to_host

FILE_BYTES = 128 << 20
"""A rank's parts are written in files of about this size, each of which is put together in memory first."""


@dataclass(frozen=True)
class Shards:
    """This process's side of the sharded files: the ranks' mesh in host memory, and a group for the writing threads."""

    mesh: DeviceMesh
    group: dist.ProcessGroup

    def kept(self, tensor: torch.Tensor, *, copies: bool) -> torch.Tensor:
        """This rank's part in host memory, as it is now, and not only until the next step where `copies`."""
        if not isinstance(tensor, DTensor):
            return host_copy(tensor) if copies else tensor
        part = cast(DTensor, tensor.detach()).to_local()
        return self.divided(host_copy(part) if copies else to_host(part), tensor.shape)

    def divided(self, part: torch.Tensor, shape: torch.Size) -> DTensor:
        """A tensor of this shape in host memory, of which this rank has `part`: rows, as FSDP divides them."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def empty(self, like: torch.Tensor) -> DTensor:
        """Room for this rank's part of a tensor of that shape and dtype."""
        rows = -(-like.shape[0] // self.mesh.size())
        first = min(self.mesh.get_local_rank() * rows, like.shape[0])
        part = torch.empty((min(rows, like.shape[0] - first), *like.shape[1:]), dtype=like.dtype)
        return self.divided(part, like.shape)

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the parts of all ranks, which all call this, on threads of their own if they like.

        Raises what any rank has met, on all of them.
        """
        self._save(tensors, HuggingFaceStorageWriter(str(folder), _file_numbers(tensors), save_distributed=True))

    def write_whole(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the parts, which rank 0 then puts together into files of whole tensors, piece by piece."""
        writer = HuggingFaceStorageWriter(
            str(folder), _file_numbers(tensors), save_distributed=True, enable_consolidation=True
        )
        self._save(tensors, writer)

    def _save(self, tensors: Mapping[str, torch.Tensor], writer: HuggingFaceStorageWriter) -> None:
        save(dict(tensors), storage_writer=writer, process_group=self.group)


def read_shards(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill whole tensors, or this rank's parts, from the files that any number of ranks has written; each rank reads by
    itself. Raises KeyError or RuntimeError where one of the tensors is not there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _file_numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    filled = 0
    for name, tensor in tensors.items():  # the same on all ranks
        numbers[name] = 1 + filled // FILE_BYTES
        filled += tensor.nbytes // (tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1)
    return numbers


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What `write_whole` has written, mapped: the kernel reads what is used, and may forget it again."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found
