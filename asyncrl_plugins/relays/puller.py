"""Versions pulled over ZeroMQ, from the source that the learner names."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from asyncrl.config.run_sections import NetworkConfig
from asyncrl_plugins.relays.download import RelayedDownload, RelayPull, SourceFailed
from asyncrl_plugins.relays.relay import Relay
from protocol.codec import MIB, Limits
from protocol.curve import HandshakeRejected, read_server_keys
from protocol.download import RETRY_S, Pull
from protocol.endpoints import BindError
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Chunk, Error, Source, SourceFailure, SourceRequest, WeightManifest
from protocol.sockets import BadMessage, ServerSocket

logger = logging.getLogger(__name__)

LEARNER = Source(version=0)
"""The answer of a learner that names no other source."""


class RelayPuller:
    """The server's end of the channel. Belongs to the event loop.

    `failures` counts servers that were to send and did not, by reason.
    """

    def __init__(self, network: NetworkConfig, session: str):
        self._network = network
        self._session = session
        self._asks = True
        self._relay: Relay | None = None
        self.failures: dict[str, int] = {}
        self.received_bytes: dict[str, int] = {"learner": 0, "server": 0}
        """Bytes of weights by who has sent them."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that this server has sent to others."""
        return self._relay.sent_bytes if self._relay else 0

    async def receive(self, socket: ServerSocket, manifest: WeightManifest, into: memoryview) -> None:
        """Fill `into` with a version; `socket` goes to the learner's weights endpoint.

        Raises ProtocolError VERSION_GONE if the learner has moved on, MALFORMED if what it sends itself is damaged, and
        TimeoutError if nothing arrives from it for network.timeout_s.
        """
        before = dict(self.received_bytes)
        await self._receive(socket, RelayedDownload(manifest, into))
        learner, server = (self.received_bytes[source] - before[source] for source in ("learner", "server"))
        logger.debug(
            "version %d: bytes from the learner: %d, from other servers: %d", manifest.version, learner, server
        )

    async def _receive(self, socket: ServerSocket, download: RelayedDownload) -> None:
        if not self._asks:
            await self._from_learner(socket, download)
            return
        relay = self._listen()
        if relay is not None:
            relay.offer(download)
        try:
            await self._from_any(socket, download)
        except BaseException:
            if relay is not None:
                relay.withdraw(download)
            raise

    def _listen(self) -> Relay | None:
        """Open the endpoint where others fetch from here, with the first version; None where it cannot be opened."""
        if self._relay is None:
            try:
                self._relay = Relay(self._network)
            except BindError as problem:
                logger.warning("this server sends no weights to others: %s", problem)
                self._asks = False
        return self._relay

    async def _from_any(self, socket: ServerSocket, download: RelayedDownload) -> None:
        failure: SourceFailure | None = None
        while not download.is_complete:
            source = await self._ask(socket, download, failure)
            if self._relay is not None:
                self._relay.admit(source.peer_keys)
            if not source.endpoint:
                await self._from_learner(socket, download)
                return
            try:
                await self._from_server(source, download)
            except SourceFailed as problem:
                logger.warning("%s. Asking the learner for another source", problem)
                self.failures[problem.reason] = self.failures.get(problem.reason, 0) + 1
                failure = SourceFailure(server_id=source.server_id, reason=problem.reason)

    async def _from_learner(self, socket: ServerSocket, download: RelayedDownload) -> None:
        before = download.received_bytes
        try:
            await Pull(download, socket, timeout_s=self._network.timeout_s).run()
        finally:
            self.received_bytes["learner"] += download.received_bytes - before

    async def _from_server(self, source: Source, download: RelayedDownload) -> None:
        """Raises SourceFailed."""
        before, socket = download.received_bytes, None
        try:
            socket = self._dial(source)
            await RelayPull(download, socket, timeout_s=self._network.timeout_s, relay=source.server_id).run()
        except (HandshakeRejected, BindError) as problem:
            raise SourceFailed("silent", f"no connection to {source.server_id}: {problem}") from problem
        finally:
            self.received_bytes["server"] += download.received_bytes - before
            if socket is not None:
                socket.close()

    def _dial(self, source: Source) -> ServerSocket:
        network = self._network
        keys = read_server_keys(Path(network.keys_dir)) if network.keys_dir else None
        return ServerSocket(
            source.endpoint,
            (Chunk, Error),
            Limits(max_message_bytes=network.max_message_mib * MIB),
            keys=replace(keys, peer_public=source.key.encode()) if keys else None,
            insecure=network.insecure,
            linger_s=0.0,
        )

    async def _ask(self, socket: ServerSocket, download: RelayedDownload, failure: SourceFailure | None) -> Source:
        """Next source to fetch from. Raises ProtocolError VERSION_GONE, and TimeoutError without an answer."""
        manifest = download.manifest
        request = SourceRequest(
            version=manifest.version,
            publication=manifest.publication,
            session=self._session,
            endpoint=self._relay.endpoint if self._relay else "",
            key=self._relay.key if self._relay else "",
            failure=failure,
        )
        timeout_s = self._network.timeout_s
        deadline, asked_at = time.monotonic() + timeout_s, -RETRY_S
        while (now := time.monotonic()) < deadline:
            if now - asked_at >= RETRY_S:
                await socket.send(request, timeout_s=deadline - now)
                asked_at = time.monotonic()
            message = await socket.recv(min(RETRY_S, max(deadline - now, 0.0)))
            if isinstance(message, BadMessage):
                logger.warning("weights: %s", message.error)
            elif isinstance(message, Source) and message.version == manifest.version:
                return message
            elif isinstance(message, Error) and message.version in (None, manifest.version):
                if message.code is ErrorCode.VERSION_GONE:
                    raise ProtocolError(message.code, message.reason)
                if message.code is ErrorCode.WRONG_CHANNEL:
                    self._asks = False
                    logger.warning("%s. Give it rollout.weights_channel=relay, too", message.reason)
                logger.info("fetching version %d from the learner: %s", manifest.version, message.reason)
                return LEARNER
        raise TimeoutError(
            f"waited {timeout_s:g} s for the learner at {socket.endpoint} to say where version {manifest.version} is"
        )

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
