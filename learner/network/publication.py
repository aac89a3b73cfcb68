"""The publication of policy versions as bytes for the rollout servers, in shared memory where there is any."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.device_rules import DEVICE_CHANNELS
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.published import tensor_bytes
from learner.network.device_weights import DeviceWeights
from learner.training.train_engine import TrainEngine
from protocol.endpoints import SHARED_MEMORY
from protocol.faults import crash_point
from protocol.messages import WeightManifest
from protocol.weight_file import PublicationError
from protocol.weights import Publication, Tensor


def open_publication(run_id: str) -> Publication:
    """Create the publication in /dev/shm, or where there is none in the folder for temporary files."""
    return Publication(run_id, SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))


def open_device_weights(config: RunConfig, publication: Publication, engine: TrainEngine) -> DeviceWeights | None:
    """Create the copies of versions in device memory, for transfers between devices.

    None where the device is lent while servers load (trainer.mode=sync), for adapters, which are small, where
    learner.engine divides the model, and where a plan of the device's memory (gpu_memory.budget_gib) has no room for
    the versions.
    """
    if config.trainer.mode == "sync" or config.learner.is_divided or engine.adapter is not None:
        return None
    required = config.rollout.weights_channel in DEVICE_CHANNELS
    if config.gpu_memory.budget_gib and not required:
        return None
    network = config.network
    return DeviceWeights(
        publication,
        engine.device,
        engine.facts.published_bytes,
        host="0.0.0.0" if network.host == "*" else network.host,
        deadline_s=network.timeout_s,
        first_s=config.first_meeting_s,
        required=required,
    )


def publish(
    publication: Publication, engine: TrainEngine, version: int, device_weights: DeviceWeights | None = None
) -> WeightManifest:
    """Write the engine's weights as `version`. Raises BadStateError where there is no room."""
    try:
        manifest = publication.publish(version, _tensors(engine), engine.adapter)
    except PublicationError as error:
        raise BadStateError(f"version {version} could not be published: {error}") from error
    if device_weights is not None:
        device_weights.keep(manifest, engine.published_state())
    return manifest


def _tensors(engine: TrainEngine) -> Iterator[Tensor]:
    for name, tensor in engine.published_state():
        crash_point("weights.publishing")
        yield Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_bytes(tensor))
