"""A version as one flat tensor of bytes on a device, laid out like its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import xxhash

from protocol.messages import CudaMemory, TensorEntry

BUCKET_BYTES = 64 << 20
"""Size of one collective, and of one copy to the host to be checked."""


class OwnStreams:
    """CUDA streams beside the default one, on which every thread begins and the model's own kernels are queued:
    transfers and the model's work do not wait for each other.

    They are used again. Torch keeps freed memory for the stream that it was taken for: a new stream for each transfer
    would take the memory of a whole version each time, and leave that of the last one where nobody finds it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.cuda.Stream] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """Run on a stream that no other transfer is on."""
        if self._device.type != "cuda":
            yield
            return
        stream = self._free.pop() if self._free else torch.cuda.Stream(self._device)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                yield
        finally:
            self._free.append(stream)


def release(device: torch.device) -> None:
    """Give the memory of a version that was dropped back to the device, once nothing there reads it any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def pack(
    entries: Sequence[TensorEntry], tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """[total_bytes] uint8 on `device`: a copy of `tensors`, which come in the order of `entries`, as they are."""
    flat = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8, device=device)
    for (_, own), (_, tensor) in zip(views(flat, entries), tensors, strict=True):
        own.copy_(tensor)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other threads, with other streams, read it
    return flat


def views(flat: torch.Tensor, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry, without a copy."""
    for entry in entries:
        raw = flat[entry.offset : entry.offset + entry.nbytes]
        yield entry.name, raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)


def wrong_tensors(flat: torch.Tensor, entries: Sequence[TensorEntry]) -> list[str]:
    """Names of the tensors that do not have their checksum, which needs their bytes on the host."""
    host = torch.empty(min(BUCKET_BYTES, flat.nbytes), dtype=torch.uint8, pin_memory=flat.is_cuda)
    wrong: list[str] = []
    for entry in entries:
        hashed = xxhash.xxh3_64()
        for start in range(entry.offset, entry.offset + entry.nbytes, BUCKET_BYTES):
            piece = flat[start : min(start + BUCKET_BYTES, entry.offset + entry.nbytes)]
            hashed.update(host[: piece.nbytes].copy_(piece).numpy().data)
        if hashed.intdigest() != entry.xxh3:
            wrong.append(entry.name)
    return wrong


def share(flat: torch.Tensor) -> CudaMemory:
    """Export the CUDA IPC handle of the tensor: another process on the same GPU opens it with `open_shared`.

    The other process must be done before `flat` goes, or it sees wrong bytes (see `settle`).
    """
    # The device's number means something in this process only: the receiver has its own for the same GPU.
    _, *handles = flat.untyped_storage()._share_cuda_()
    return CudaMemory(**dict(zip(CudaMemory.model_fields, handles, strict=True)))


def open_shared(memory: CudaMemory, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 in the other process's memory."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *memory.model_dump().values())
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def settle(memory: CudaMemory, device: torch.device) -> None:
    """Release the IPC counter of a receiver that never ended its transfer: until then torch keeps the memory."""
    torch.UntypedStorage._release_ipc_counter(memory.counter, memory.counter_offset, device=device)
