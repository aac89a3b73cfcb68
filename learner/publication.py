"""Each policy version as bytes for the rollout servers, in shared memory where there is any."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import BadStateError
from asyncrl.faults import crash_point
from asyncrl.models.published import tensor_bytes
from learner.engines.base import TrainEngine
from protocol.endpoints import SHARED_MEMORY
from protocol.layout import PublicationError
from protocol.messages import WeightManifest
from protocol.weights import Publication, Tensor


def open_publication(run_id: str) -> Publication:
    """In /dev/shm, or where there is none in the folder for temporary files."""
    return Publication(run_id, SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))


def publish(publication: Publication, engine: TrainEngine, version: int) -> WeightManifest:
    """Write the engine's weights as `version`. Raises BadStateError where there is no room."""
    try:
        return publication.publish(version, _tensors(engine), engine.adapter)
    except PublicationError as error:
        raise BadStateError(f"version {version} could not be published: {error}") from error


def _tensors(engine: TrainEngine) -> Iterator[Tensor]:
    for name, tensor in engine.published_state():
        crash_point("weights.publishing")
        yield Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_bytes(tensor))
