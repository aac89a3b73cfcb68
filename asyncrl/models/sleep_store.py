"""Where the contents of sleeping tensors are kept: a file, or pinned memory of the host."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from asyncrl.errors import BadStateError

CHUNK_BYTES = 256 << 20
"""Pinned memory is allocated in powers of two: in pieces of this size little is wasted."""


class Store(Protocol):
    """Bytes outside the device."""

    def reserve(self, nbytes: int) -> None: ...

    def put(self, offset: int, flat: torch.Tensor) -> None:
        """`flat` is [N] uint8 on the device."""
        ...

    def get(self, offset: int, flat: torch.Tensor) -> None: ...

    def finish(self) -> None:
        """All that was put or got is there."""
        ...


class SpillFile:
    """In the run directory, without a name: it vanishes with the process, however that ends."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._fd = -1

    def reserve(self, nbytes: int) -> None:
        if self._fd < 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._fd = os.dup(file.fileno())
        if nbytes:
            os.posix_fallocate(self._fd, 0, nbytes)  # without room this fails before anything has moved

    def put(self, offset: int, flat: torch.Tensor) -> None:
        view = flat.numpy().data
        while view.nbytes:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def get(self, offset: int, flat: torch.Tensor) -> None:
        view = flat.numpy().data
        while view.nbytes:
            read = os.preadv(self._fd, [view], offset)
            if not read:
                raise BadStateError(f"the file of sleeping tensors in {self._folder} ends at {offset} bytes")
            view, offset = view[read:], offset + read

    def finish(self) -> None:
        pass


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
