"""The learner's end of channels between device memories, which plug-ins bring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.config.service_sections import RolloutConfig
from asyncrl.config.weight_channels import device_channels
from asyncrl.plugins import implementation
from learner.training.engine import TorchEngine
from protocol.messages import DeviceSource, Error, TransferEnd, TransferRequest, TransferStart, WeightManifest
from protocol.weights import Publication


class DeviceSender(Protocol):
    """Copies and transfers of the newest version. The training thread calls `keep`, the network thread the rest."""

    source: DeviceSource | None
    """Device in the welcome of servers; None: nothing is sent from it."""

    def keep(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the published tensors, which the next step changes."""
        ...

    def answer(self, identity: bytes, request: TransferRequest) -> TransferStart | Error:
        """Start a transfer for this connection, ending its previous one."""
        ...

    def end(self, identity: bytes, message: TransferEnd) -> None: ...

    def close(self) -> None: ...


def open_device_sender(
    rollout: RolloutConfig, network: NetworkConfig, publication: Publication, engine: TorchEngine, *, first_s: float
) -> DeviceSender | None:
    """Create the copies of versions in device memory, for transfers between devices.

    `first_s` is the longest time for the first transfer. None where no channel between devices is installed or chosen,
    and for adapters, which are small.
    """
    channels = device_channels(rollout.weights_channel)
    if not channels or engine.adapter is not None:
        return None
    return implementation(next(iter(channels.values())).implementation)(
        publication,
        engine.device,
        engine.facts.published_bytes,
        host="0.0.0.0" if network.host == "*" else network.host,
        deadline_s=network.timeout_s,
        first_s=first_s,
        required=rollout.uses_device_channel,
    )
