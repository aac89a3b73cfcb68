"""Weights that have arrived for an engine, and its receivers of those that come from device memory."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncrl.weight_transfer.group import TransferError
from asyncrl.weight_transfer.stage import Arrival, Stage, StageOrder, device_memory
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import WeightManifest

CHECK_EVERY_S = 0.02
SILENT = 3
"""A receiver that says nothing for so many of its own deadlines (its peers, the group, the first bytes) is stuck."""


@dataclass(frozen=True)
class ArrivedWeights:
    """A published version that is here and has its checksums. Iterating gives names and tensors."""

    manifest: WeightManifest
    pieces: Mapping[str, memoryview]
    """Bytes of each tensor."""
    path: str = ""
    """File with the layout of the manifest, for other processes of this server; it does not change while the weights
    are handed over. Empty where there is none (not Linux)."""
    stage: Stage | None = None
    """Receiver in this process that has them on the engine's device."""

    @property
    def is_staged(self) -> bool:
        """True if they are on the engine's own devices: in `stage`, or in its worker processes."""
        return not self.pieces and not self.path

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views, not copies: the engine copies from them once."""
        if self.stage is not None:
            yield from self.stage.tensors()
            return
        with warnings.catch_warnings():
            # Shared memory is mapped read-only, and these views are only read.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for entry in self.manifest.tensors:
                crash_point("weights.loading")
                raw = torch.from_numpy(np.frombuffer(self.pieces[entry.name], np.uint8))
                yield entry.name, raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)


@dataclass(frozen=True)
class DeviceMemory:
    """A CUDA device that the model, or a part of it, lies on."""

    uuid: str
    free_bytes: int


class Staging:
    """An engine's receivers, for channels from device memory to device memory: one, beside a model in this process.

    An engine with its model in other processes has its own `_begin` and `_call`.
    """

    _has_begun = False
    """True after the first transfer, whose communicator may take longer."""

    def __init__(self, device: torch.device):
        self.receivers = 1
        self.stage: Stage | None = Stage(device)
        self._device = device

    async def _begin(self, order: StageOrder) -> None:
        assert self.stage is not None
        self.stage.begin(order, rank=1)

    async def _call(self, what: str) -> list[Sequence[Any]]:
        """`device_memory` or `weights_arrival` of each receiver, as plain values, or `drop_weights`."""
        assert self.stage is not None
        if what == "drop_weights":
            self.stage.drop()
        return [(device_memory(self._device) or ()) if what == "device_memory" else astuple(self.stage.arrival)]

    async def devices(self) -> Sequence[DeviceMemory]:
        """Empty on a CPU."""
        return [DeviceMemory(*device) for device in await self._call("device_memory") if device]

    async def receive(self, order: StageOrder) -> None:
        """Wait until all receivers have a version, verified. They keep their own deadlines, one for each thing that
        they wait for; a receiver that says nothing for `SILENT` of them, and the first time for that of its
        first communicator, is stuck.

        Raises TransferError, and ProtocolError where another attempt would end alike.
        """
        if self._has_begun:
            order = replace(order, first_s=0.0)
        self._has_begun = True
        await self._begin(order)
        seen, since = [Arrival()], time.monotonic()
        limit_s = SILENT * order.deadline_s + order.first_s
        while True:
            arrivals = [Arrival(*fields) for fields in await self._call("weights_arrival")]
            for number, arrival in enumerate(arrivals):
                reason = f"version {order.version}, receiver {number}: {arrival.problem}"
                if arrival.code:
                    raise ProtocolError(ErrorCode(arrival.code), reason)
                if arrival.problem:
                    raise TransferError(reason)
            if all(arrival.is_done for arrival in arrivals):
                return
            if arrivals != seen:
                seen, since = arrivals, time.monotonic()
            elif time.monotonic() - since > limit_s:
                done = " and ".join(f"{arrival.arrived_bytes:,}" for arrival in arrivals)
                waited = f"waited {limit_s:g} s for version {order.version}"
                raise TransferError(f"{waited}: the receivers have {done} bytes")
            await asyncio.sleep(CHECK_EVERY_S)

    def weights(self, manifest: WeightManifest) -> ArrivedWeights:
        """The version that was received last, for `update_weights`."""
        return ArrivedWeights(manifest, {}, stage=self.stage)

    async def drop(self) -> None:
        """Free what was received."""
        await self._call("drop_weights")
