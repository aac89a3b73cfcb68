"""An engine's receivers for channels from device memory to device memory, in this process or in its workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.weight_transfer.group import DamagedError, TransferError
from asyncrl.weight_transfer.stage import Arrival, Stage, StageOrder, device_memory
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import WeightManifest
from rollout_server.engines.base import ArrivedWeights

LOOK_EVERY_S = 0.02
GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """A CUDA device that the model, or a part of it, lies on."""

    uuid: str
    free_bytes: int


@dataclass(frozen=True)
class StagedWeights(ArrivedWeights):
    """Verified, and on the engine's own devices: in `stage`, or in those of its worker processes."""

    stage: Stage | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.stage is not None, "the workers load them"
        return self.stage.tensors()


class Staging(Protocol):
    """An engine's receivers, for channels from device memory to device memory."""

    receivers: int

    async def devices(self) -> Sequence[DeviceMemory]:
        """Empty on a CPU."""
        ...

    async def receive(self, order: StageOrder) -> None:
        """Until all of them have it, verified. Raises TransferError, or without room ProtocolError WRONG_CHANNEL."""
        ...

    def weights(self, manifest: WeightManifest) -> ArrivedWeights:
        """What was received last, for `update_weights`."""
        ...

    async def drop(self) -> None:
        """Forget it."""
        ...


class LocalStaging:
    """Of an engine whose model is in this process."""

    receivers = 1

    def __init__(self, device: torch.device):
        self._device = device
        self._stage = Stage(device)

    async def devices(self) -> Sequence[DeviceMemory]:
        return [DeviceMemory(*found) for found in [device_memory(self._device)] if found]

    async def receive(self, order: StageOrder) -> None:
        self._stage.begin(order, rank=1)

        async def look() -> list[Arrival]:
            return [self._stage.arrival]

        await until_arrived(order, look)

    def weights(self, manifest: WeightManifest) -> ArrivedWeights:
        return StagedWeights(manifest, {}, stage=self._stage)

    async def drop(self) -> None:
        self._stage.drop()


async def until_arrived(order: StageOrder, look: Callable[[], Awaitable[list[Arrival]]]) -> None:
    """Receivers keep their own deadlines; one that says nothing for twice as long is stuck. Raises as `receive`."""
    total = order.tensors[-1]["offset"] + order.tensors[-1]["nbytes"]
    seen, since = [Arrival()], time.monotonic()
    while True:
        arrivals = await look()
        for number, arrival in enumerate(arrivals):
            if arrival.kind == "no_room":
                raise ProtocolError(
                    ErrorCode.WRONG_CHANNEL,
                    f"version {order.version} ({total / GIB:.1f} GiB) finds no room beside the engine's model: "
                    f"{arrival.problem}",
                )
            if arrival.problem:
                failure = DamagedError if arrival.kind == "damaged" else TransferError
                reason = f"version {order.version}, receiver {number}: {arrival.problem}"
                raise failure(reason, min(each.arrived_bytes for each in arrivals))
        if all(arrival.is_done for arrival in arrivals):
            return
        if arrivals != seen:
            seen, since = arrivals, time.monotonic()
        elif time.monotonic() - since > 2 * order.deadline_s:
            done = [f"{arrival.arrived_bytes:,}" for arrival in arrivals]
            raise TransferError(
                f"waited {2 * order.deadline_s:g} s for version {order.version}: of {total:,} bytes the receivers "
                f"have {' and '.join(done)}",
                min(arrival.arrived_bytes for arrival in arrivals),
            )
        await asyncio.sleep(LOOK_EVERY_S)
