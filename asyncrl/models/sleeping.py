"""Tensors that sleep: their contents leave the device, and come back bit for bit.

The tensor objects stay, emptied: an optimiser, tied modules, all that refers to one sees it whole again after waking.
From a GPU the contents go to pinned host memory. Where the device is the CPU, its memory is the host's: they go to a
file without a name, which the kernel removes with the process.
"""

from __future__ import annotations

import os
import tempfile
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
PIECE_BYTES = 4 * MIB
"""Summed at a time: a CPU sums a wider copy, for which there may be no room."""


class SpillFile:
    """A file without a name in the run directory: it vanishes with the process, however that ends."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: Any = None

    def reserve(self, nbytes: int) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it stays open)
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
    """Chunks that stay allocated from one sleep to the next: pinning memory takes longer than filling it."""

    def __init__(self, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES):
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
            torch.cuda.synchronize()


@dataclass
class _Sleeping:
    """A tensor without its contents, and how to make it whole."""

    tensor: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset in the store; -1 if the contents were forgotten."""
    bit_sum: int


class Sleeper:
    """Puts the tensors of one owner to sleep, together."""

    def __init__(self, owner: str, device: torch.device, folder: Path, store: HostMemory | None = None):
        """`folder` is for the file, where the device is the CPU."""
        self.owner = owner
        self.device = device
        self._store = store or (SpillFile(folder) if device.type == "cpu" else HostMemory(pinned=True))
        self._sleeping: list[_Sleeping] = []

    @property
    def is_asleep(self) -> bool:
        return bool(self._sleeping)

    def check_awake(self) -> None:
        if self.is_asleep:
            raise BadStateError(f"{self.owner} is asleep: its tensors are not on {self.device}. Wake it first")

    @torch.no_grad()
    def sleep(self, tensors: Iterable[torch.Tensor], *, forget: Iterable[torch.Tensor] = ()) -> int:
        """Take the contents off the device; those of `forget` are not kept. Returns the bytes that left it.

        Tensors elsewhere are left alone. If there is no room for the contents (OSError), nothing has changed.
        """
        self.check_awake()
        forgotten = {id(tensor) for tensor in forget}
        chosen = {id(tensor): tensor for tensor in tensors if self._is_here(tensor)}
        sleeping = _plan(chosen.values(), forgotten)
        kept = [item for item in sleeping if item.offset >= 0]
        self._store.reserve(sum(_nbytes(item.tensor) for item in kept))
        for item in kept:
            flat = _flat(item.tensor)
            item.bit_sum = _bit_sum(flat)
            self._store.put(item.offset, flat)
        self._store.finish()
        moved = sum(_nbytes(item.tensor) for item in sleeping)
        for item in sleeping:
            item.tensor.data = torch.empty(0, dtype=item.tensor.dtype, device=self.device)
        self._sleeping = sleeping
        free_caches(self.device)
        return moved

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    @torch.no_grad()
    def wake(self) -> int:
        """Bring everything back. What was forgotten has its memory again, with anything in it. Returns the bytes.

        Raises BadStateError when the device has no room, or a tensor is not what it was.
        """
        fresh = self._restored()
        for item, whole in zip(self._sleeping, fresh, strict=True):
            item.tensor.data = whole
        self._sleeping = []
        return sum(_nbytes(whole) for whole in fresh)

    def _restored(self) -> list[torch.Tensor]:
        """Whole tensors."""
        free_caches(self.device)
        fresh: list[torch.Tensor] = []
        try:
            self._restore_into(fresh)
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            needed = sum(item.size.numel() * item.tensor.element_size() for item in self._sleeping)
            got = sum(_nbytes(whole) for whole in fresh)
            fresh.clear()
            raise no_room_to_wake(self.owner, self.device, needed, got, free_bytes(self.device)) from problem
        return fresh

    def _restore_into(self, fresh: list[torch.Tensor]) -> None:
        for item in self._sleeping:
            fresh.append(torch.empty_strided(item.size, item.stride, dtype=item.tensor.dtype, device=self.device))
        kept = [(item, whole) for item, whole in zip(self._sleeping, fresh, strict=True) if item.offset >= 0]
        for item, whole in kept:
            self._store.get(item.offset, _flat(whole))
        self._store.finish()
        for number, (item, whole) in enumerate(kept, 1):
            found = _bit_sum(_flat(whole))
            if found != item.bit_sum:
                raise BadStateError(
                    f"{self.owner} woke up damaged: tensor {number} of {len(kept)}, {whole.dtype}{tuple(whole.shape)}, "
                    f"went to sleep with bit sum {item.bit_sum} and came back with {found}"
                )


def no_room_to_wake(owner: str, device: torch.device, needed: int, got: int, free: int) -> BadStateError:
    """The error for a device without room; all numbers in bytes."""
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


def _plan(tensors: Iterable[torch.Tensor], forgotten: set[int]) -> list[_Sleeping]:
    planned: list[_Sleeping] = []
    offset = 0
    for tensor in tensors:
        stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
        kept = id(tensor) not in forgotten
        planned.append(_Sleeping(tensor, tensor.size(), tuple(stride), offset if kept else -1, 0))
        offset += -(-_nbytes(tensor) // 64) * 64 if kept else 0
    return planned


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements fill a block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[N] uint8 in the order of memory, without a copy where the tensor is dense."""
    dense = tensor.detach() if _is_dense(tensor) else tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8)


def _bit_sum(flat: torch.Tensor) -> int:
    """The sum of the bytes' words as whole numbers: exact, whatever the order in which a device adds."""
    return sum(_sum_of_words(piece) for piece in flat.split(PIECE_BYTES))


def _sum_of_words(flat: torch.Tensor) -> int:
    words = flat.numel() // 4 * 4
    whole, rest = flat[:words], flat[words:]
    if whole.storage_offset() % 4:
        whole = whole.clone()
    return int(whole.view(torch.int32).sum(dtype=torch.int64)) + int(rest.sum(dtype=torch.int64))
