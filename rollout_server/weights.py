"""How a new policy gets from the learner into the engine: mapped from shared memory, or pulled over ZeroMQ."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.models.loading import fingerprint_of
from protocol.codec import MIB
from protocol.faults import crash_point
from protocol.messages import Chunk, Error, WeightManifest, WeightsLoaded
from protocol.shm import check_manifest, open_shm
from protocol.transfer import fetch
from rollout_server.dialling import dial
from rollout_server.engines.base import InferenceEngine

logger = logging.getLogger(__name__)

Channel = Literal["shm", "zmq"]


def choose_channel(configured: str, *, same_host: bool) -> Channel:
    """`auto` is shared memory on the learner's host and ZeroMQ elsewhere."""
    if configured == "shm" and not same_host:
        raise UserError(
            "rollout.weights_channel is shm, but this server does not share memory with the learner. "
            "Set rollout.weights_channel=auto or zmq"
        )
    if configured == "auto":
        return "shm" if same_host else "zmq"
    return "zmq" if configured == "zmq" else "shm"


class WeightReceiver:
    """Fetches published versions and hands them to the engine."""

    def __init__(self, config: RunConfig, engine: InferenceEngine, channel: Channel, endpoint: str):
        self._config = config
        self._engine = engine
        self.channel: Channel = channel
        self._socket = dial(config, endpoint, (Chunk, Error)) if channel == "zmq" else None

    async def load(self, manifest: WeightManifest) -> WeightsLoaded:
        """Put this version into the engine. Raises ProtocolError VERSION_GONE if the learner has moved on."""
        self._check_that_it_fits(manifest)
        started = time.monotonic()
        if self.channel == "shm":
            with open_shm(manifest) as mapped:
                transferred = time.monotonic()
                await self._engine.update_weights(manifest.version, _as_tensors(manifest, mapped.tensors))
        else:
            assert self._socket is not None
            data = bytearray(manifest.total_bytes)
            await fetch(self._socket, manifest, data, timeout_s=self._config.network.timeout_s)
            transferred = time.monotonic()
            view = memoryview(data)
            pieces = {entry.name: view[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors}
            await self._engine.update_weights(manifest.version, _as_tensors(manifest, pieces))
        return WeightsLoaded(
            version=manifest.version,
            channel=self.channel,
            transfer_s=transferred - started,
            load_s=time.monotonic() - transferred,
        )

    def _check_that_it_fits(self, manifest: WeightManifest) -> None:
        """Before any memory is taken for it: the manifest is a stranger's word for what the model looks like."""
        check_manifest(manifest)
        found = fingerprint_of(((t.name, f"torch.{t.dtype}", t.shape) for t in manifest.tensors), manifest.adapter)
        if found != self._engine.architecture_fingerprint:
            raise BadStateError(
                f"the learner publishes {len(manifest.tensors)} tensors of {manifest.total_bytes / MIB:,.1f} MiB as "
                f"version {manifest.version}, whose names, shapes or dtypes are not those of this server's model "
                f"({self._config.model.path}). Start both sides with the same model.path, model.dtype and model.lora"
            )

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _as_tensors(manifest: WeightManifest, pieces: Mapping[str, memoryview]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views, not copies: the engine copies from them once."""
    with warnings.catch_warnings():
        # Shared memory is mapped read-only, and nobody writes through these views.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for entry in manifest.tensors:
            crash_point("weights.loading")
            raw = torch.from_numpy(np.frombuffer(pieces[entry.name], np.uint8))
            yield entry.name, raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)
