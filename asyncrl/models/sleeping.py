"""Offload tensors from a device (sleep) and restore them bit for bit (wake).

The tensor objects stay, emptied: an optimiser, tied modules, all that refers to one sees it whole again after waking.
From a GPU the contents go to pinned host memory. Where the device is the CPU, its memory is the host's: they go to a
file without a name, which the kernel removes with the process.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import BadStateError
from asyncrl.models.devices import free_bytes, free_caches, is_out_of_memory

CHUNK_BYTES = 256 << 20
"""Pinned memory is allocated in powers of two: in pieces of this size little is wasted."""
MIB = 1 << 20
PIECE_WORDS = MIB
"""Words summed at a time: a CPU sums a wider copy, for which there may be no room."""


class SpillFile:
    """Unnamed temporary file in `folder`; closed with this object, and freed when the process ends, however it does."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: Any = None

    def reserve(self, nbytes: int) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it stays open)
            weakref.finalize(self, self._file.close)
        if nbytes:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)  # without room this fails before anything has moved

    def put(self, offset: int, flat: torch.Tensor) -> None:
        """`flat` is [N] uint8 on the device."""
        self._file.seek(offset)
        self._file.write(flat.numpy().data)

    def get(self, offset: int, flat: torch.Tensor) -> None:
        self._file.seek(offset)
        if self._file.readinto(flat.numpy().data) != flat.nbytes:
            raise BadStateError(f"the file of sleeping tensors in {self._folder} is cut off")

    def finish(self) -> None:
        """Wait until all copies are done."""
        self._file.flush()


class HostMemory:
    """Host buffers for offloaded tensors, kept for the next sleep: pinning memory takes longer than filling it."""

    def __init__(self, device: torch.device, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES):
        self._device = device
        self._pinned = pinned
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    def reserve(self, nbytes: int) -> None:
        while len(self._chunks) * self._chunk_bytes < nbytes:
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))

    def put(self, offset: int, flat: torch.Tensor) -> None:
        for host, device in self._pieces(offset, flat):
            host.copy_(device, non_blocking=True)

    def get(self, offset: int, flat: torch.Tensor) -> None:
        for host, device in self._pieces(offset, flat):
            device.copy_(host, non_blocking=True)

    def _pieces(self, offset: int, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        done = 0
        while done < flat.numel():
            chunk, start = divmod(offset + done, self._chunk_bytes)
            count = min(self._chunk_bytes - start, flat.numel() - done)
            yield self._chunks[chunk][start : start + count], flat[done : done + count]
            done += count

    def finish(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self._device)  # the owner's, which need not be the current one


@dataclass
class _Sleeping:
    """An offloaded tensor: its metadata, store offset and bit sum."""

    tensor: torch.Tensor
    like: torch.Tensor
    """Its shape, dtype and strides, on torch's meta device."""
    offset: int
    """Offset in the store; -1 if the contents were forgotten."""
    bit_sum: int = 0


class Sleeper:
    """Offloads and restores the tensors of one owner, all together."""

    def __init__(self, owner: str, device: torch.device, folder: Path, store: HostMemory | None = None):
        """`folder`: place of the spill file if the device is the CPU and no `store` is given."""
        self.owner = owner
        self.device = device
        self._store = store or (SpillFile(folder) if device.type == "cpu" else HostMemory(device, pinned=True))
        self._sleeping: list[_Sleeping] = []

    @property
    def is_asleep(self) -> bool:
        return bool(self._sleeping)

    def check_awake(self) -> None:
        if self.is_asleep:
            raise BadStateError(f"{self.owner} is asleep: its tensors are not on {self.device}. Wake it first")

    @torch.no_grad()
    def sleep(self, tensors: Iterable[torch.Tensor], *, forget: Iterable[torch.Tensor] = ()) -> int:
        """Offload the contents, and discard those of `forget`. Returns the bytes freed on the device.

        Tensors elsewhere are left alone. If there is no room for the contents (OSError), nothing has changed.
        """
        self.check_awake()
        forgotten = {id(tensor) for tensor in forget}
        sleeping: list[_Sleeping] = []
        end = 0
        for tensor in {id(tensor): tensor for tensor in tensors if self._is_here(tensor)}.values():
            keeps = id(tensor) not in forgotten
            sleeping.append(_Sleeping(tensor, torch.empty_like(tensor, device="meta"), end if keeps else -1))
            end += -(-tensor.nbytes // 64) * 64 if keeps else 0
        self._store.reserve(end)
        for item in sleeping:
            if item.offset >= 0:
                flat = _flat(item.tensor)
                item.bit_sum = _bit_sum(flat)
                self._store.put(item.offset, flat)
        self._store.finish()
        for item in sleeping:
            item.tensor.data = torch.empty(0, dtype=item.tensor.dtype, device=self.device)
        self._sleeping = sleeping
        free_caches(self.device)
        return sum(item.like.nbytes for item in sleeping)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    @torch.no_grad()
    def wake(self) -> int:
        """Restore the contents; discarded tensors are uninitialised. Returns the bytes allocated.

        Raises BadStateError when the device has no room, or a tensor is not what it was.
        """
        free_caches(self.device)
        needed = sum(item.like.nbytes for item in self._sleeping)
        fresh: list[torch.Tensor] = []
        try:
            for item in self._sleeping:
                fresh.append(torch.empty_like(item.like, device=self.device))
            for number, (item, whole) in enumerate(zip(self._sleeping, fresh, strict=True), 1):
                if item.offset >= 0:
                    self._restore(item, whole, f"tensor {number} of {len(fresh)}")
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            got = sum(whole.nbytes for whole in fresh)
            fresh.clear()
            raise no_room_to_wake(self.owner, self.device, needed, got, free_bytes(self.device)) from problem
        for item, whole in zip(self._sleeping, fresh, strict=True):
            item.tensor.data = whole
        self._sleeping = []
        return needed

    def _restore(self, item: _Sleeping, whole: torch.Tensor, name: str) -> None:
        """Fill the new tensor with the kept contents, and compare their bit sum."""
        flat = _flat(whole)
        self._store.get(item.offset, flat)
        self._store.finish()
        found = _bit_sum(flat)
        if found != item.bit_sum:
            raise BadStateError(
                f"{self.owner} woke up damaged: {name}, {whole.dtype}{tuple(whole.shape)}, went to sleep with bit sum "
                f"{item.bit_sum} and came back with {found}"
            )
        if not whole.is_contiguous():
            whole.copy_(flat.view(whole.dtype).view(whole.shape))


def no_room_to_wake(owner: str, device: torch.device, needed: int, got: int, free: int) -> BadStateError:
    """Error for a device without enough memory to wake; all numbers in bytes."""
    return BadStateError(
        f"{owner} cannot wake: it needs {needed / MIB:,.0f} MiB on {device} and got {got / MIB:,.0f}; "
        f"{free / MIB:,.0f} MiB are free. Stop what else is on the device, or make both sides smaller "
        "(`asyncrl doctor --plan`)"
    )


def bit_sums(tensors: Iterable[tuple[str, torch.Tensor]], into: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass named tensors on and note the bit sum of each."""
    for name, tensor in tensors:
        into[name] = _bit_sum(_flat(tensor))
        yield name, tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[N] uint8, row by row: a view, or a copy where the tensor's memory has another order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _bit_sum(flat: torch.Tensor) -> int:
    """The sum of the bytes' words as whole numbers: exact, whatever the order in which a device adds."""
    flat = flat.clone() if flat.storage_offset() % 4 else flat
    words = flat.numel() // 4 * 4
    pieces = [*flat[:words].view(torch.int32).split(PIECE_WORDS), flat[words:]]
    return sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
