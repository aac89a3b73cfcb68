"""Weights that have arrived for an engine, and the processes that hold its model, for functions of plug-ins there.

vLLM's worker processes import this, so it imports as little as possible.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from asyncrl.plugins import implementation
from protocol.faults import crash_point
from protocol.messages import WeightManifest


@dataclass
class ModelProcess:
    """Process that holds the model or a part of it, as a function that runs in it sees it."""

    device: torch.device
    rank: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """Objects that functions keep between their calls, by the name of the plug-in."""


class ModelProcesses(Protocol):
    count: int
    own: ModelProcess | None
    """Process of the model, if it is this one alone."""

    async def run(self, function: str, *arguments: Any) -> list[Any]:
        """Call `module:function` with a ModelProcess and the arguments in each process. Returns the results, by rank;
        both are plain values: they may go from process to process."""
        ...

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """Block in which the engine computes nothing."""
        ...


class ThisProcess:
    """The whole model lies in this process."""

    count = 1

    def __init__(self, device: torch.device):
        self.own: ModelProcess | None = ModelProcess(device)

    async def run(self, function: str, *arguments: Any) -> list[Any]:
        return [implementation(function)(self.own, *arguments)]

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class ArrivedWeights:
    """A published version that is here and has its checksums. Iterating gives names and tensors."""

    manifest: WeightManifest
    pieces: Mapping[str, memoryview]
    """Bytes of each tensor."""
    path: str = ""
    """File with the layout of the manifest, for other processes of this server; it does not change while the weights
    are handed over. Empty where there is none (not Linux)."""
    staged: str = ""
    """`module:function` that yields names and tensors in each process of the model, where a channel has left them on
    its device; empty: they are in host memory."""
    process: ModelProcess | None = None
    """Process of the model, if it is this one alone."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views, not copies: the engine copies from them once."""
        if self.staged:
            yield from implementation(self.staged)(self.process)
            return
        with warnings.catch_warnings():
            # Shared memory is mapped read-only, and these views are only read.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for entry in self.manifest.tensors:
                crash_point("weights.loading")
                raw = torch.from_numpy(np.frombuffer(self.pieces[entry.name], np.uint8))
                yield entry.name, raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)
