"""Offload tensors from a device (sleep) and restore them bit for bit (wake).

The tensor objects stay, emptied: an optimiser, tied modules, all that refers to one sees it whole again after waking.
Where libraries keep views of what they have divided, the memory behind them is emptied, and the views stay.
From a GPU the contents go to pinned host memory. Where the device is the CPU, its memory is the host's: they go to a
file without a name, which the kernel removes with the process.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.devices.device import free_bytes, free_caches, is_out_of_memory
from asyncrl.errors import BadStateError

CHUNK_BYTES = 256 << 20
"""Pinned memory is allocated in powers of two: in pieces of this size little is wasted."""
MIB = 1 << 20
PIECE_WORDS = MIB
"""Words summed at a time: a CPU sums a wider copy, for which there may be no room."""
FIXED_TOKENS = 16
LARGEST_DIFFERENCE = {"cpu": 0.0, "cuda": 1e-2}
"""Accepted difference of a fixed token's log-prob over a sleep, in nats by device type. The bits of the weights are
equal: a GPU library may only choose another kernel."""


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
        self._file.write(_bytes_of(flat))

    def get(self, offset: int, flat: torch.Tensor) -> None:
        self._file.seek(offset)
        if self._file.readinto(_bytes_of(flat)) != flat.nbytes:
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


class _Tensor:
    """A tensor whose memory nobody else refers to."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._like = self._whole = torch.empty_like(tensor, device="meta")
        self.nbytes = tensor.nbytes
        self.name = f"{tensor.dtype}{tuple(tensor.shape)}"

    def flat(self) -> torch.Tensor:
        return _flat(self._tensor)

    def empty(self) -> None:
        self._tensor.data = torch.empty(0, dtype=self._tensor.dtype, device=self._tensor.device)

    def allocate(self, device: torch.device) -> None:
        self._whole = torch.empty_like(self._like, device=device)

    def restore(self, fill: Callable[[torch.Tensor], None]) -> None:
        flat = _flat(self._whole)
        fill(flat)
        if not self._whole.is_contiguous():
            self._whole.copy_(flat.view(self._whole.dtype).view(self._whole.shape))

    def finish(self) -> None:
        self._tensor.data = self._whole

    def abandon(self) -> None:
        self._whole = self._like


class _Memory:
    """The memory behind any number of tensors, which all see it come and go."""

    def __init__(self, tensor: torch.Tensor):
        self._storage = tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self.name = f"{self.nbytes} bytes of {tensor.dtype}"
        self._flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)

    def flat(self) -> torch.Tensor:
        return self._flat

    def empty(self) -> None:
        self._storage.resize_(0)

    def allocate(self, device: torch.device) -> None:
        self._storage.resize_(self.nbytes)

    def restore(self, fill: Callable[[torch.Tensor], None]) -> None:
        fill(self._flat)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        self._storage.resize_(0)


@dataclass
class _Sleeping:
    """Something offloaded, its place in the store and bit sum."""

    what: _Tensor | _Memory
    offset: int
    """Offset in the store; -1 if the contents were forgotten."""
    bit_sum: int = 0


class Sleeper:
    """Offloads and restores the tensors of one owner, all together."""

    def __init__(
        self,
        owner: str,
        device: torch.device,
        folder: Path,
        store: HostMemory | None = None,
        *,
        has_views: bool = False,
    ):
        """`folder`: place of the spill file if the device is the CPU and no `store` is given. `has_views`: others keep
        views of the tensors."""
        self.owner = owner
        self.device = device
        self._has_views = has_views
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
        here = (tensor for tensor in tensors if self._is_here(tensor))
        for tensor in {self._identity(tensor): tensor for tensor in here}.values():
            keeps = id(tensor) not in forgotten
            emptied = self._has_views and tensor.untyped_storage().resizable()
            what = _Memory(tensor) if emptied else _Tensor(tensor)
            sleeping.append(_Sleeping(what, end if keeps else -1))
            end += -(-what.nbytes // 64) * 64 if keeps else 0
        self._store.reserve(end)
        for item in sleeping:
            if item.offset >= 0:
                flat = item.what.flat()
                item.bit_sum = _bit_sum(flat)
                self._store.put(item.offset, flat)
        self._store.finish()
        for item in sleeping:
            item.what.empty()
        self._sleeping = sleeping
        free_caches(self.device)
        return sum(item.what.nbytes for item in sleeping)

    def _identity(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr() if self._has_views else id(tensor)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    @torch.no_grad()
    def wake(self) -> int:
        """Restore the contents; discarded tensors are uninitialised. Returns the bytes allocated.

        Raises BadStateError when the device has no room, or a tensor is not what it was.
        """
        free_caches(self.device)
        needed = sum(item.what.nbytes for item in self._sleeping)
        got = 0
        try:
            for item in self._sleeping:
                item.what.allocate(self.device)
                got += item.what.nbytes
            for number, item in enumerate(self._sleeping, 1):
                if item.offset >= 0:
                    self._restore(item, f"tensor {number} of {len(self._sleeping)}")
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            for item in self._sleeping:
                item.what.abandon()
            raise no_room_to_wake(self.owner, self.device, needed, got, free_bytes(self.device)) from problem
        for item in self._sleeping:
            item.what.finish()
        self._sleeping = []
        return needed

    def _restore(self, item: _Sleeping, name: str) -> None:
        """Fill it with the kept contents, and compare their bit sum."""

        def fill(flat: torch.Tensor) -> None:
            self._store.get(item.offset, flat)
            self._store.finish()
            found = _bit_sum(flat)
            if found != item.bit_sum:
                raise BadStateError(
                    f"{self.owner} woke up damaged: {name}, {item.what.name}, went to sleep with bit sum "
                    f"{item.bit_sum} and came back with {found}"
                )

        item.what.restore(fill)


def no_room_to_wake(owner: str, device: torch.device, needed: int, got: int, free: int) -> BadStateError:
    """Error for a device without enough memory to wake; all numbers in bytes."""
    return BadStateError(
        f"{owner} cannot wake: it needs {needed / MIB:,.0f} MiB on {device} and got {got / MIB:,.0f}; "
        f"{free / MIB:,.0f} MiB are free. Stop what else is on the device, or make both sides smaller "
        "(`asyncrl doctor --plan`)"
    )


def fixed_tokens(vocabulary: int, special: Collection[int]) -> np.ndarray:
    """[T] int32 ids spread over the vocabulary, none of them `special`: a model gives their log-probs before and after
    a sleep, through the path that samples or trains."""
    ids = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.fromiter(special, np.int32))
    return ids[np.linspace(0, len(ids) - 1, FIXED_TOKENS).astype(int)]


def check_wake_parity(owner: str, before: torch.Tensor, after: torch.Tensor, device: torch.device) -> None:
    """Compare [T] log-probs of the fixed tokens. Raises BadStateError with the numbers on a mismatch.

    The check is of a model as a whole, where `Sleeper` compares each tensor, and of vLLM, which moves its own.
    """
    difference = (before - after).abs()
    worst = int(difference.argmax())
    if not float(difference.max()) <= LARGEST_DIFFERENCE[device.type]:  # NaN is no parity, either
        raise BadStateError(
            f"{owner} is not what it was before it slept: the log-prob of fixed token {worst} was "
            f"{float(before[worst]):.6f} and is {float(after[worst]):.6f} (largest difference accepted on "
            f"{device.type}: {LARGEST_DIFFERENCE[device.type]:g})"
        )


def bit_sums(tensors: Iterable[tuple[str, torch.Tensor]], into: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass named tensors on and note the bit sum of each."""
    for name, tensor in tensors:
        into[name] = _bit_sum(_flat(tensor))
        yield name, tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[N] uint8, row by row: a view, or a copy where the tensor's memory has another order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _bytes_of(flat: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a tensor of the CPU. As an array of NumPy it could not be emptied any more."""
    return (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())


def _bit_sum(flat: torch.Tensor) -> int:
    """The sum of the bytes' words as whole numbers: exact, whatever the order in which a device adds."""
    flat = flat.clone() if flat.storage_offset() % 4 else flat
    words = flat.numel() // 4 * 4
    pieces = [*flat[:words].view(torch.int32).split(PIECE_WORDS), flat[words:]]
    return sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
