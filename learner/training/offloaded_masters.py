"""Master weights in host memory, with their gradients and AdamW's moments (ZeRO-Offload, arXiv 2101.06840, sec. 4).

The device keeps the model's weights alone: 2 bytes of a 16-bit parameter where training takes 18. A gradient leaves it
as soon as the backward pass has made it, while the pass goes on, and is added up in fp32 on the host, where the
optimiser steps; the rounded weights come back. Same operations in the same order as without it: on a CPU, same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from asyncrl.config.engine_rules import GRADIENTS_IN_FLIGHT
from learner.training.master_weights import MasterWeights


class OffloadedMasters(MasterWeights):
    """A master on the host for each trained parameter, fp32 ones included."""

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__(model)
        self._link = _Link(device)
        self._gradients: dict[str, torch.Tensor] = {}
        """Host memory for sums of gradients, kept between steps."""
        self._summed: set[str] = set()
        """Names that have a gradient in this update."""
        for name, parameter in self._trained.items():
            parameter.grad_dtype = torch.float32
            parameter.register_post_accumulate_grad_hook(self._taker(name))

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return _pinned_like(parameter).copy_(parameter.detach())

    def _taker(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            if name not in self._gradients:
                self._gradients[name] = _pinned_like(parameter)
            self._link.to_host(gradient, self._gradients[name], add=name in self._summed)
            self._summed.add(name)

        return take

    def take_gradients(self) -> None:
        self._link.settle()
        for name, master in self._copies.items():
            master.grad = self._gradients[name] if name in self._summed else None
        self._summed.clear()

    def drop_gradients(self) -> None:
        self._link.settle()
        self._summed.clear()

    @torch.no_grad()
    def round_into_parameters(self) -> None:
        for name, master in self._copies.items():
            self._link.to_device(master, self._trained[name])
        self._link.settle()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Those of 16-bit parameters, as without offload: an fp32 parameter is the same as its master."""
        return {name: self._copies[name] for name in self._rounded()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._check_names(state.keys(), self._rounded(), folder)
        for name, master in self._copies.items():
            master.copy_(state[name] if name in state else self._trained[name].detach())

    def _rounded(self) -> list[str]:
        return [name for name, parameter in self._trained.items() if parameter.dtype != torch.float32]


def _pinned_like(parameter: torch.Tensor) -> torch.Tensor:
    """fp32 on the host; pinned where it is copied to and from a GPU."""
    return torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.device.type == "cuda")


@dataclass
class _Copy:
    """A copy that is under way, and what is done on the host when it is there."""

    done: torch.Event
    then: Callable[[], object] | None


class _Link:
    """Copies between a device and pinned host memory, beside the device's work. On a CPU they are done at once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[_Copy] = deque()
        self._buffers: list[torch.Tensor] = []
        """[bytes] pinned, one for each copy that may be under way."""
        self._turn = 0

    def to_host(self, gradient: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
        """Put an fp32 gradient into `target`, or add it."""
        stream = self._stream
        if stream is None:
            target.add_(gradient) if add else target.copy_(gradient)
            return
        self._make_room()
        arrived = self._buffer(gradient.numel(), torch.float32).view(gradient.shape) if add else target
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            arrived.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)  # its memory is free when the copy is done
        self._note((lambda: target.add_(arrived)) if add else None)

    def to_device(self, master: torch.Tensor, parameter: torch.Tensor) -> None:
        """Set a parameter to its master, rounded on the host: half the bytes on the link."""
        stream = self._stream
        if stream is None:
            parameter.copy_(master)
            return
        self._make_room()
        rounded = master
        if parameter.dtype != master.dtype:
            rounded = self._buffer(master.numel(), parameter.dtype).view(master.shape).copy_(master)
        stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still compute with it
        with torch.cuda.stream(stream):
            parameter.copy_(rounded, non_blocking=True)
        self._note(None)

    def settle(self) -> None:
        """Wait until all copies are done; the device's later work sees them."""
        while self._under_way:
            self._finish_oldest()

    def _make_room(self) -> None:
        while len(self._under_way) >= GRADIENTS_IN_FLIGHT:
            self._finish_oldest()

    def _note(self, then: Callable[[], object] | None) -> None:
        assert self._stream is not None
        done = torch.Event(self._device)
        done.record(self._stream)
        self._under_way.append(_Copy(done, then))

    def _finish_oldest(self) -> None:
        oldest = self._under_way.popleft()
        oldest.done.synchronize()
        if oldest.then is not None:
            oldest.then()

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of the buffer that no copy under way uses."""
        self._turn = (self._turn + 1) % GRADIENTS_IN_FLIGHT
        while len(self._buffers) < GRADIENTS_IN_FLIGHT:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        nbytes = numel * dtype.itemsize
        if self._buffers[self._turn].numel() < nbytes:
            self._buffers[self._turn] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn][:nbytes].view(dtype)
