"""Master weights in host memory, with their gradients and AdamW's moments (ZeRO-Offload, arXiv 2101.06840, sec. 4).

The device keeps the model's weights alone: 2 bytes of a 16-bit parameter where training takes 18. A gradient leaves it
as soon as the backward pass has made it, while the pass goes on, and is added up in fp32 on the host, where the
optimiser steps; the rounded weights come back. Same operations in the same order as without it: on a CPU, same bits.

Sums of several micro-batches are taken on the device, which is faster there than the link is: the sum so far is fetched
while the gradient is computed, and goes back with it added, beside the next one that comes. Norms are taken there, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from asyncrl.config.parts import GRADIENTS_IN_FLIGHT
from learner.training.master_weights import MasterWeights

PIECE = 1 << 28
"""Numbers in a piece of pinned memory, 1 GiB."""


class OffloadedMasters(MasterWeights):
    """A master on the host for each trained parameter, fp32 ones included."""

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__(model)
        largest = max((4 * p.numel() for p in self._trained.values()), default=0)
        self._link = _Link(device, GRADIENTS_IN_FLIGHT * largest)
        self._norms: dict[str, torch.Tensor] = {}
        """Norm of each sum of gradients, on the device."""
        self._gradients: dict[str, torch.Tensor] = {}
        """Host memory for sums of gradients, kept between steps."""
        self._summed: set[str] = set()
        """Names that have a gradient in this update."""
        for name, parameter in self._trained.items():
            parameter.grad_dtype = torch.float32
            parameter.register_post_accumulate_grad_hook(self._taker(name))

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.detach().to("cpu", torch.float32, copy=True)

    def _taker(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            if name not in self._gradients:
                self._gradients[name] = self._link.host_memory(parameter.numel()).view(parameter.shape)
            self._norms[name] = self._link.to_host(gradient, self._gradients[name], add=name in self._summed)
            self._summed.add(name)

        return take

    def take_gradients(self) -> None:
        self._link.settle()
        for name, master in self._copies.items():
            master.grad = self._gradients[name] if name in self._summed else None
        self._summed.clear()

    def norm(self) -> torch.Tensor:
        norms = [self._norms[name] for name in self._trained if name in self._norms]
        self._norms.clear()
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def drop_gradients(self) -> None:
        self._link.settle()
        self._summed.clear()
        self._norms.clear()

    @torch.no_grad()
    def round_into_parameters(self) -> None:
        for name, master in self._copies.items():
            self._link.to_device(master, self._trained[name])
        self._link.settle()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """State of 16-bit parameters, as without offload: an fp32 parameter is its own master."""
        return {name: self._copies[name] for name in self._rounded()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._check_names(state.keys(), self._rounded(), folder)
        for name, master in self._copies.items():
            master.copy_(state[name] if name in state else self._trained[name].detach())

    def _rounded(self) -> list[str]:
        return [name for name, parameter in self._trained.items() if parameter.dtype != torch.float32]


class _Link:
    """Copies between a device and the host, beside the device's work. On a CPU they are done at once."""

    def __init__(self, device: torch.device, largest_bytes: int):
        """`largest_bytes`: device memory of the gradients, and sums of them, that may be under way."""
        self._device, self._largest_bytes = device, largest_bytes
        self._down = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._up = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[torch.Event, int]] = deque()
        """Ends of the copies that may not have ended, with the bytes that each holds, the oldest first."""
        self._arrived: dict[int, torch.Event] = {}
        """End of the last copy into each place in host memory."""
        self._rounded = [torch.empty(0, dtype=torch.uint8)] * GRADIENTS_IN_FLIGHT
        """Pinned buffers, one for each copy to the device that may be under way."""
        self._free = torch.empty(0)
        """Free rest of the newest piece of pinned memory."""

    def host_memory(self, numel: int) -> torch.Tensor:
        """[numel] fp32, pinned for a GPU: torch rounds what it pins up to a power of two, so pieces are shared."""
        if self._down is None:
            return torch.empty(numel)
        if numel > self._free.numel():
            piece = torch.empty(max(numel, PIECE), pin_memory=True)
            if numel >= PIECE:
                return piece
            self._free = piece
        taken, self._free = self._free[:numel], self._free[numel:]
        return taken

    def to_host(self, gradient: torch.Tensor, target: torch.Tensor, *, add: bool) -> torch.Tensor:
        """Put an fp32 gradient into `target`, or add it. Returns the norm of what is there then, on the device."""
        down, up = self._down, self._up
        if down is None or up is None:
            target.add_(gradient) if add else target.copy_(gradient)
            return torch.linalg.vector_norm(target)
        nbytes = gradient.nbytes * (1 + add)
        while self._under_way and sum(held for _, held in self._under_way) + nbytes > self._largest_bytes:
            self._under_way.popleft()[0].synchronize()
        whole = gradient
        if add:
            with torch.cuda.stream(up):  # which waits for no gradient
                up.wait_event(self._arrived[target.data_ptr()])
                whole = target.to(self._device, non_blocking=True)
            down.wait_stream(up)
        down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(down):
            whole = whole.add_(gradient) if add else whole
            norm = torch.linalg.vector_norm(whole)
            target.copy_(whole, non_blocking=True)
        for used in (gradient, whole):
            used.record_stream(down)  # its memory is free when the copy is done
        self._arrived[target.data_ptr()] = self._note(down, nbytes)
        return norm

    def to_device(self, master: torch.Tensor, parameter: torch.Tensor) -> None:
        """Set a parameter to its master, rounded on the host: half the bytes on the link."""
        stream = self._up
        if stream is None:
            parameter.copy_(master)
            return
        while len(self._under_way) >= GRADIENTS_IN_FLIGHT:
            self._under_way.popleft()[0].synchronize()
        nbytes = parameter.numel() * parameter.dtype.itemsize
        self._rounded.append(self._rounded.pop(0))  # the one that no copy under way reads
        if self._rounded[0].numel() < nbytes:
            self._rounded[0] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        rounded = self._rounded[0][:nbytes].view(parameter.dtype).view(parameter.shape).copy_(master)
        stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still compute with it
        with torch.cuda.stream(stream):
            parameter.copy_(rounded, non_blocking=True)
        self._note(stream, nbytes)

    def settle(self) -> None:
        """Wait until all copies are done; the device's later work sees them."""
        while self._under_way:
            self._under_way.popleft()[0].synchronize()

    def _note(self, stream: torch.cuda.Stream, nbytes: int) -> torch.Event:
        done = torch.Event(self._device)
        done.record(stream)
        self._under_way.append((done, nbytes))
        return done
