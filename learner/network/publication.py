"""The publication of policy versions: bytes for the rollout servers, in shared memory where there is any, and copies in
device memory for channels between devices. The learner's end of channels that plug-ins bring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Protocol

import torch

from asyncrl.config.parts import WEIGHT_CHANNELS, device_channels
from asyncrl.config.run_sections import NetworkConfig
from asyncrl.config.service_sections import RolloutConfig
from asyncrl.devices.host_copies import host_pieces
from asyncrl.errors import BadStateError, UserError
from asyncrl.plugins import implementation
from learner.network.servers import Servers
from learner.training.engine import TorchEngine
from protocol.faults import crash_point
from protocol.messages import (
    DeviceSource,
    Error,
    Source,
    SourceRequest,
    TransferEnd,
    TransferRequest,
    TransferStart,
    WeightManifest,
)
from protocol.weight_file import PublicationError
from protocol.weights import Publication, Tensor, publication_folder


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


class SourceFinder(Protocol):
    """Chooses the peer that a server pulls a version from. Used by the network thread."""

    def answer(self, request: SourceRequest) -> Source | Error:
        """Name the source of a version for the server that asks."""
        ...


OpenSources = Callable[[Servers, Publication, Callable[[], Collection[bytes]] | None], SourceFinder | None]
"""Opens a SourceFinder from the servers, the publication, and a function that reads the public keys of the servers that
may connect, None without keys. Returns None where the learner sends to all."""


def source_opener(rollout: RolloutConfig) -> OpenSources:
    """The learner's end of a channel whose servers ask for a source."""
    channel = WEIGHT_CHANNELS[rollout.weights_channel]
    if not channel.puller:
        return lambda servers, publication, known_keys: None
    return partial(implementation(channel.implementation), rollout)


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


def open_publication(run_id: str) -> Publication:
    """Create the publication in /dev/shm, or where there is none in the folder for temporary files. Raises UserError
    where it may not be written: another attempt would meet the same."""
    try:
        return Publication(run_id, publication_folder())
    except PublicationError as error:
        raise UserError(str(error)) from error


def publish(
    publication: Publication, engine: TorchEngine, version: int, device_sender: DeviceSender | None = None
) -> WeightManifest:
    """Write the engine's weights as `version`. Raises BadStateError where there is no room."""
    try:
        manifest = publication.publish(version, _tensors(engine), engine.adapter)
    except PublicationError as error:
        raise BadStateError(f"version {version} could not be published: {error}") from error
    if device_sender is not None:
        device_sender.keep(manifest, engine.published_state())
    return manifest


def _tensors(engine: TorchEngine) -> Iterator[Tensor]:
    for name, tensor in engine.published_state():
        crash_point("weights.publishing")
        with closing(host_pieces(tensor)) as pieces:  # which may not be read to their end
            yield Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), pieces)
