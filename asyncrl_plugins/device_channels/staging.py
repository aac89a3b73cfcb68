"""An engine's receivers of weights that come from device memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

from asyncrl_plugins.device_channels.group import TransferError
from asyncrl_plugins.device_channels.stage import Arrival, StageOrder
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import WeightManifest
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcesses
from rollout_server.weights.channels import DeviceMemory

STAGE = "asyncrl_plugins.device_channels.stage"
"""Module of the functions that run in each process of the model."""
CHECK_EVERY_S = 0.02
SILENT = 3
"""A receiver that says nothing for so many of its own deadlines (its peers, the group, the first bytes) is stuck."""


class Staging:
    """An engine's receivers: one beside the model, or its part, in each process that has one."""

    _has_begun = False
    """True after the first transfer, whose communicator may take longer."""

    def __init__(self, processes: ModelProcesses):
        self.receivers = processes.count
        self._processes = processes

    async def _begin(self, order: StageOrder) -> None:
        await self._processes.run(f"{STAGE}:begin", asdict(order))

    async def _call(self, what: str) -> list[Sequence[Any]]:
        """`memory` or `arrival` of each receiver, as plain values, or `drop`."""
        return await self._processes.run(f"{STAGE}:{what}")

    async def devices(self) -> Sequence[DeviceMemory]:
        """Empty on a CPU."""
        return [DeviceMemory(*device) for device in await self._call("memory") if device]

    async def receive(self, order: StageOrder) -> None:
        """Wait until all receivers have a version, verified. They keep their own deadlines, one for each thing that
        they wait for; a receiver that says nothing for `SILENT` of them, and the first time for that of its
        first communicator, is stuck.

        An engine of several processes rests meanwhile: their own communicators and the group's, on the same GPUs in
        different orders, can deadlock (NCCL user guide, "concurrent communicators").

        Raises TransferError, and ProtocolError where another attempt would end alike.
        """
        async with self._processes.at_rest() if self.receivers > 1 else nullcontext():
            await self._receive(order)

    async def _receive(self, order: StageOrder) -> None:
        if self._has_begun:
            order = replace(order, first_s=0.0)
        self._has_begun = True
        await self._begin(order)
        seen, since = [Arrival()], time.monotonic()
        limit_s = SILENT * order.deadline_s + order.first_s
        while True:
            arrivals = [Arrival(*fields) for fields in await self._call("arrival")]
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
        return ArrivedWeights(manifest, {}, staged=f"{STAGE}:tensors", process=self._processes.own)

    async def drop(self) -> None:
        """Free what was received."""
        await self._call("drop")
