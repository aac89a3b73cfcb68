"""The publication of policy versions as bytes for the rollout servers, in shared memory where there is any."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import BadStateError
from asyncrl.models.published import tensor_bytes
from learner.network.device_sender import DeviceSender
from learner.training.engine import TorchEngine
from protocol.endpoints import SHARED_MEMORY
from protocol.faults import crash_point
from protocol.messages import WeightManifest
from protocol.weight_file import PublicationError
from protocol.weights import Publication, Tensor


def open_publication(run_id: str) -> Publication:
    """Create the publication in /dev/shm, or where there is none in the folder for temporary files."""
    return Publication(run_id, SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))


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
        yield Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_bytes(tensor))
