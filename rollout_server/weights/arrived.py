"""Weights that have arrived for an engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.plugins import implementation
from protocol.faults import crash_point
from protocol.messages import WeightManifest
from rollout_server.weights.model_processes import ModelProcess


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
