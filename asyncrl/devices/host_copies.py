"""Copies between host and device through pinned memory, in buckets: a GPU reads and writes pageable memory slowly.

While one bucket is on its way over the bus, the other one is filled or emptied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from functools import cache
from typing import Any

import torch

BUCKET_BYTES = 64 << 20


class PinnedBuckets:
    """Two pinned buckets of a device. One copy at a time; any thread may ask."""

    def __init__(self, device: torch.device, *, pinned: bool = True, bucket_bytes: int = BUCKET_BYTES):
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buckets = [torch.empty(bucket_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._arrived: list[Callable[[], Any]] = [_nothing, _nothing]
        """Waits until the last copy of each bucket has ended."""
        self._guard = threading.Lock()

    def to_host(self, source: torch.Tensor) -> Generator[torch.Tensor]:
        """[N] uint8 on the device -> its bytes in host memory, one piece after another, each until the next is asked
        for: that one is on its way meanwhile."""
        begun: deque[tuple[int, torch.Tensor]] = deque()
        with self._guard:
            for number, piece in self._pieces(source.numel()):
                if len(begun) == 2:
                    yield self._arrive(*begun.popleft())
                begun.append((number, self._buckets[number][: piece.stop - piece.start]))
                self._begin(*begun[-1], source[piece])
            while begun:
                yield self._arrive(*begun.popleft())

    def _arrive(self, number: int, bucket: torch.Tensor) -> torch.Tensor:
        self._arrived[number]()
        return bucket

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """[N] uint8 in any host memory -> [N] uint8 on the device, in the order of the current stream.

        The source may be changed when this returns.
        """
        with self._guard:
            for number, piece in self._pieces(source.numel()):
                bucket = self._buckets[number][: piece.stop - piece.start]
                self._arrived[number]()
                bucket.copy_(source[piece])
                self._begin(number, target[piece], bucket)

    def _pieces(self, nbytes: int) -> Generator[tuple[int, slice]]:
        """Yield the bucket and the place of each piece."""
        for count, start in enumerate(range(0, nbytes, self._bucket_bytes)):
            yield count % 2, slice(start, min(start + self._bucket_bytes, nbytes))

    def _begin(self, number: int, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._arrived[number] = event.synchronize


def _nothing() -> None:
    pass


@cache
def _buckets(device: torch.device) -> PinnedBuckets:
    return PinnedBuckets(device)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is on the CPU, else a contiguous copy."""
    if not _is_on_gpu(tensor):
        return tensor.to("cpu")
    host, place = torch.empty(tensor.shape, dtype=tensor.dtype), 0
    for piece in _buckets(tensor.device).to_host(flat_bytes(tensor.contiguous())):
        flat_bytes(host)[place : place + len(piece)].copy_(piece)
        place += len(piece)
    return host


def host_pieces(tensor: torch.Tensor) -> Generator[memoryview]:
    """Raw little-endian bytes of a tensor, one piece after another, each until the next one is asked for."""
    flat = flat_bytes(tensor.detach().contiguous())
    if not _is_on_gpu(tensor):
        yield flat.cpu().numpy().data
        return
    with closing(_buckets(tensor.device).to_host(flat)) as pieces:
        for piece in pieces:
            yield piece.numpy().data


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, which stays as the tensor is now."""
    host = to_host(tensor.detach())
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def copy_into(own: torch.Tensor, given: torch.Tensor) -> None:
    """`own` becomes `given`, of the same shape and dtype; on a GPU in the order of its current stream."""
    if _is_on_gpu(own) and not _is_on_gpu(given) and own.is_contiguous():
        _buckets(own.device).to_device(flat_bytes(given.contiguous()), flat_bytes(own))
    else:
        own.copy_(given)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[nbytes] uint8, a view of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
