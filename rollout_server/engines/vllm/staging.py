"""The receivers of device channels in vLLM's workers, through its weight-transfer API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from asyncrl.weight_transfer.stage import Arrival, StageOrder
from protocol.messages import WeightManifest
from rollout_server.engines.base import ArrivedWeights
from rollout_server.engines.vllm.engine_death import answered
from rollout_server.engines.vllm.vllm_api import VllmApi
from rollout_server.weights.staging import DeviceMemory, StagedWeights, until_arrived


class WorkerStaging:
    """Each worker takes the whole version, and loads its part of it."""

    def __init__(
        self, llm: Any, vllm: VllmApi, receivers: int, at_rest: Callable[[], AbstractAsyncContextManager[None]]
    ):
        """Inside `at_rest()` vLLM computes nothing."""
        self.receivers = receivers
        self._llm = llm
        self._vllm = vllm
        self._at_rest = at_rest

    async def devices(self) -> Sequence[DeviceMemory]:
        found = await answered(self._llm, self._llm.collective_rpc("device_memory"))
        return [DeviceMemory(*device) for device in found if device]

    async def receive(self, order: StageOrder) -> None:
        """One worker samples meanwhile. Several do not: their own communicators and the group's, at work on the same
        GPUs in different orders, can wait for each other for ever (NCCL user guide, "concurrent communicators")."""
        async with self._at_rest() if self.receivers > 1 else nullcontext():
            await self._llm.init_weight_transfer_engine(self._vllm.WeightTransferInitRequest(asdict(order)))
            await until_arrived(order, self._look)

    async def _look(self) -> list[Arrival]:
        return [Arrival(*told) for told in await self._llm.collective_rpc("weights_arrival")]

    def weights(self, manifest: WeightManifest) -> ArrivedWeights:
        return StagedWeights(manifest, {})

    async def drop(self) -> None:
        await answered(self._llm, self._llm.collective_rpc("drop_weights"))
