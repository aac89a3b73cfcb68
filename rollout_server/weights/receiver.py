"""Receiver of new policies: mapped from shared memory, pulled over ZeroMQ, or from device memory to device memory."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.models.published import fingerprint_of
from protocol.codec import MIB
from protocol.download import fetch
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Channel, Chunk, Error, Source, TransferStart, WeightManifest, WeightsLoaded
from protocol.sockets import ServerSocket
from protocol.weight_file import check_manifest, open_shm
from rollout_server.engines.arrived_weights import ArrivedWeights
from rollout_server.engines.base import InferenceEngine
from rollout_server.link import dial
from rollout_server.weights.channels import DeviceReceiver, Puller, open_receiver

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Versions that do not arrive between devices, in a row, before a server that may choose takes another channel."""


class WeightReceiver:
    """Fetches published versions and hands them to the engine."""

    def __init__(
        self,
        model_path: str,
        network: NetworkConfig,
        first_meeting_s: float,
        engine: InferenceEngine,
        channel: Channel,
        endpoint: str,
        *,
        instead: Channel | None = None,
        puller: Puller | None = None,
    ):
        """`instead`: fallback when transfers between devices fail; None if the channel was configured. `puller`: this
        server's end of a plug-in's channel over ZeroMQ."""
        self._model_path = model_path
        self._network = network
        self._first_meeting_s = first_meeting_s
        self._engine = engine
        self._endpoint = endpoint
        self._instead: Channel | None = instead
        self._socket: ServerSocket | None = None
        self._puller = puller
        self._device: DeviceReceiver | None = None
        """This side of a channel between devices, from its first version on."""
        self._next: tuple[Channel, Channel | None, str] | None = None
        self._use(channel)

    def take_from_now_on(self, channel: Channel, instead: Channel | None, endpoint: str) -> None:
        """Switch channel and endpoint from the next version on: a learner that has come back may be elsewhere."""
        self._next = channel, instead, endpoint

    def _use(self, channel: Channel) -> None:
        self._close_socket()
        self._failures = 0
        self.channel: Channel = channel
        answers = (Source, Chunk, Error) if self._is_pulled else None if channel == "shm" else (TransferStart, Error)
        self._socket = dial(self._network, self._endpoint, answers) if answers else None

    @property
    def _is_pulled(self) -> bool:
        return self.channel == "zmq" or self._puller is not None

    async def load(self, manifest: WeightManifest) -> WeightsLoaded:
        """Put a version into the engine. Raises ProtocolError VERSION_GONE if the learner has moved on, TimeoutError
        where it makes sense to try again, and UserError where the channel that was asked for does not work."""
        self._check_that_it_fits(manifest)
        if self._next is not None:
            channel, self._instead, self._endpoint = self._next
            self._next = None
            logger.info("weights come over %s now, from %s", channel, self._endpoint)
            # Where both are as before, too: answers to what the old one was asked may lie in the socket.
            self._use(channel)
        started = time.monotonic()
        over_zmq = self._pulled if self._is_pulled else self._transferred
        arrive = self._mapped if self.channel == "shm" else over_zmq
        async with arrive(manifest) as weights:
            transferred = time.monotonic()
            await self._engine.update_weights(manifest.version, weights)
        return WeightsLoaded(
            version=manifest.version,
            channel=self.channel,
            transfer_s=transferred - started,
            load_s=time.monotonic() - transferred,
        )

    @asynccontextmanager
    async def _mapped(self, manifest: WeightManifest) -> AsyncIterator[ArrivedWeights]:
        """Map the learner's file, which it neither changes nor fills again meanwhile."""
        tensors = await asyncio.to_thread(open_shm, manifest)  # it reads everything, for the checksums
        try:
            # By name it may be gone at any moment; an open file is there as long as we have it.
            fd = os.open(manifest.shm_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as problem:
            reason = f"{manifest.shm_path} (version {manifest.version}) has gone"
            raise ProtocolError(ErrorCode.VERSION_GONE, reason) from problem
        try:
            yield ArrivedWeights(manifest, tensors, _path_of(fd))
        finally:
            os.close(fd)

    @asynccontextmanager
    async def _pulled(self, manifest: WeightManifest) -> AsyncIterator[ArrivedWeights]:
        """Pull chunks into memory: a file without a name where the system has such, which vanishes with the server."""
        assert self._socket is not None
        fd, size = -1, manifest.total_bytes
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"asyncrl-version-{manifest.version}")
            os.ftruncate(fd, size)
        view = memoryview(mmap.mmap(fd, size) if fd >= 0 else bytearray(size))
        try:
            if self._puller is not None:
                await self._puller.receive(self._socket, manifest, view)
            else:
                await fetch(self._socket, manifest, view, timeout_s=self._network.timeout_s)
            pieces = {entry.name: view[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors}
            yield ArrivedWeights(manifest, pieces, _path_of(fd) if fd >= 0 else "")
        finally:
            if fd >= 0:
                os.close(fd)

    @asynccontextmanager
    async def _transferred(self, manifest: WeightManifest) -> AsyncIterator[ArrivedWeights]:
        """Receive from device memory into device memory, beside the engine's model, which samples on."""
        if self._device is None:
            self._device = open_receiver(self.channel, self._engine.processes)
        device = self._device
        assert device is not None, "choose_channel has asked"
        assert self._socket is not None
        settings = {"timeout_s": self._network.timeout_s, "first_s": self._first_meeting_s}
        try:
            try:
                host = self._network.host
                weights = await device.fetch(self._socket, manifest, self.channel, host=host, **settings)
            except TimeoutError as problem:
                self._fail(str(problem), None)
                raise
            except ProtocolError as problem:
                if problem.code is not ErrorCode.VERSION_GONE:
                    self._fail(problem.reason, problem.code)
                    raise TimeoutError(f"version {manifest.version} did not arrive: {problem.reason}") from problem
                raise
            self._failures = 0
            yield weights
        finally:
            await device.drop()

    def _fail(self, reason: str, code: ErrorCode | None) -> None:
        """Count a failure, and change to the other channel in time.

        Raises UserError where there is none to change to and another attempt is in vain (`code` says why).
        """
        if self._instead is None:
            if code is None:
                return
            raise UserError(
                f"rollout.weights_channel is {self.channel}, but {reason}. Set rollout.weights_channel=shm or zmq"
            )
        self._failures += 1
        if code is ErrorCode.WRONG_CHANNEL or self._failures == MOST_FAILURES:
            logger.warning(
                "%s: %s (failure %d in a row). From now on weights come over %s",
                *(self.channel, reason, self._failures, self._instead),
            )
            self._use(self._instead)

    def _check_that_it_fits(self, manifest: WeightManifest) -> None:
        """Compare the manifest with the model before allocating memory for it."""
        check_manifest(manifest)
        found = fingerprint_of(((t.name, f"torch.{t.dtype}", t.shape) for t in manifest.tensors), manifest.adapter)
        if found != self._engine.architecture_fingerprint:
            raise BadStateError(
                f"the learner publishes {len(manifest.tensors)} tensors of {manifest.total_bytes / MIB:,.1f} MiB as "
                f"version {manifest.version}, whose names, shapes or dtypes are not those of this server's model "
                f"({self._model_path}). Start both sides with the same model.path, model.dtype and model.lora"
            )

    def close(self) -> None:
        if self._puller is not None:
            self._puller.close()
        self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _path_of(fd: int) -> str:
    """Path under which another process of the same user opens the file; empty where there is no /proc."""
    path = f"/proc/{os.getpid()}/fd/{fd}"
    return path if os.path.exists(path) else ""
