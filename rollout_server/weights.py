"""How a new policy gets from the learner into the engine: mapped from shared memory, or pulled over ZeroMQ."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast, get_args

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.faults import crash_point
from asyncrl.models.loading import fingerprint_of
from protocol.codec import MIB
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Chunk, Error, WeightManifest, WeightsLoaded
from protocol.shm import check_manifest, open_shm
from protocol.transfer import fetch
from rollout_server.dialling import dial
from rollout_server.engines.base import ArrivedWeights, InferenceEngine

logger = logging.getLogger(__name__)

Channel = Literal["shm", "zmq"]
"""Of what this version's learner can send over."""
GPU_CHANNELS = {"nccl": "one or more GPUs of its own", "cuda_ipc": "the learner's GPU"}
"""Channels of vLLM's weight-transfer API, and where the engine must be for them."""


def choose_channel(configured: str, *, same_host: bool, engine: str = "hf", cuda: bool | None = None) -> Channel:
    """`auto` is shared memory on the learner's host and ZeroMQ elsewhere. Raises UserError with the fix."""
    if configured in GPU_CHANNELS:
        _refuse_gpu_channel(configured, same_host, engine, torch.cuda.is_available() if cuda is None else cuda)
    if configured == "shm" and not same_host:
        raise UserError(
            "rollout.weights_channel is shm, but this server does not share memory with the learner. "
            "Set rollout.weights_channel=auto or zmq"
        )
    if configured == "auto":
        return "shm" if same_host else "zmq"
    assert configured in get_args(Channel), configured
    return cast(Channel, configured)


def _refuse_gpu_channel(configured: str, same_host: bool, engine: str, cuda: bool) -> None:
    """Always raises: the last reason is that no learner sends over these channels yet.

    vLLM's half is there (engines/vllm_engine/transfer.py makes its requests). The sending half is vLLM's code, too,
    which the learner must not import, and nothing of it could be run: no GPU was at hand.
    """
    instead = "Set rollout.weights_channel=auto"
    if engine != "vllm":
        raise UserError(f"rollout.weights_channel is {configured}, which only the vllm engine has. {instead}")
    if not cuda:
        raise UserError(
            f"rollout.weights_channel is {configured}, which needs vLLM on {GPU_CHANNELS[configured]}, and torch "
            f"{torch.__version__} sees no CUDA device. {instead}"
        )
    if configured == "cuda_ipc" and not same_host:
        raise UserError(
            "rollout.weights_channel is cuda_ipc, which shares one GPU's memory between two processes of a machine, "
            f"and the learner is on another one. {instead}"
        )
    raise UserError(
        f"rollout.weights_channel is {configured}, but the learner of this version cannot send over it yet. {instead}"
    )


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
        crash_point("weights.loading")
        if self.channel == "shm":
            with _mapped(manifest) as weights:
                transferred = time.monotonic()
                await self._engine.update_weights(manifest.version, weights)
        else:
            assert self._socket is not None
            with _room_for(manifest) as (view, weights):
                await fetch(self._socket, manifest, view, timeout_s=self._config.network.timeout_s)
                transferred = time.monotonic()
                await self._engine.update_weights(manifest.version, weights)
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


@contextmanager
def _mapped(manifest: WeightManifest) -> Iterator[ArrivedWeights]:
    """The learner's file, which it neither changes nor fills again meanwhile."""
    with open_shm(manifest) as mapped:
        try:
            # By name it may be gone at any moment; an open file is there as long as we have it.
            fd = os.open(manifest.shm_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as problem:
            reason = f"{manifest.shm_path} (version {manifest.version}) has gone"
            raise ProtocolError(ErrorCode.VERSION_GONE, reason) from problem
        try:
            yield ArrivedWeights(manifest, mapped.tensors, _path_of(fd))
        finally:
            os.close(fd)


@contextmanager
def _room_for(manifest: WeightManifest) -> Iterator[tuple[memoryview, ArrivedWeights]]:
    """Memory for a whole version, as a file without a name where the system has such: nothing is left of it when the
    server and its engine are gone, however they went."""
    fd = -1
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"asyncrl-version-{manifest.version}")
        os.ftruncate(fd, manifest.total_bytes)
        view = memoryview(mmap.mmap(fd, manifest.total_bytes))
    else:
        view = memoryview(bytearray(manifest.total_bytes))
    pieces = {entry.name: view[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors}
    try:
        yield view, ArrivedWeights(manifest, pieces, _path_of(fd) if fd >= 0 else "")
    finally:
        if fd >= 0:
            os.close(fd)


def _path_of(fd: int) -> str:
    """Under which another process of the same user opens our file; empty where there is no such thing."""
    path = f"/proc/{os.getpid()}/fd/{fd}"
    return path if os.path.exists(path) else ""
