"""A tensor of one process, opened by another on the same GPU: torch's own handles, as plain bytes and numbers."""

from __future__ import annotations

import torch

from protocol.messages import CudaMemory


def share(flat: torch.Tensor) -> CudaMemory:
    """Whoever opens it must be done before `flat` goes, or see wrong bytes (see `settle`)."""
    # The device's number means something in this process only: the receiver has its own for the same GPU.
    _, handle, nbytes, offset, counter, counter_offset, event, event_sync = flat.untyped_storage()._share_cuda_()
    return CudaMemory(
        handle=bytes(handle),
        nbytes=nbytes,
        offset=offset,
        counter=bytes(counter),
        counter_offset=counter_offset,
        event=bytes(event),
        event_sync=bool(event_sync),
    )


def open_shared(memory: CudaMemory, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 in the other process's memory."""
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,
        memory.handle,
        memory.nbytes,
        memory.offset,
        memory.counter,
        memory.counter_offset,
        memory.event,
        memory.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def settle(memory: CudaMemory, device: torch.device) -> None:
    """Of a receiver that never said it was done: torch keeps the memory until the receiver's count is given back."""
    torch.UntypedStorage._release_ipc_counter(memory.counter, memory.counter_offset, device=device)
