"""A server's own weights endpoint: other servers fetch from it the version that it has, or is receiving.

What it sends has been compared with the learner's checksums before, tensor by tensor, so that a version travels through
a chain of servers almost as fast as to the first of them, and nobody passes damage on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio

from asyncrl.config.run_sections import NetworkConfig
from asyncrl_plugins.relays.download import RelayedDownload
from protocol.codec import MIB, Limits
from protocol.curve import CurveAuthenticator, read_server_keys
from protocol.download import check_size
from protocol.endpoints import BindError, address_towards, endpoint_of
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.handshake import PeerLimits
from protocol.messages import Chunk, ChunkRequest, Error
from protocol.sockets import CHUNK_QUEUES, TURN_MESSAGES, Delivery, LearnerSocket, Received

logger = logging.getLogger(__name__)

KEPT_S = 5.0
"""The version before the newest is kept until nobody has asked for it for so long: those behind us finish it."""
MOST_WAITING = 256
"""Requests that wait for bytes which have not arrived."""
REQUEST_LIMITS = Limits(max_message_bytes=MIB, max_header_bytes=MIB)
LOOK_EVERY_S = 1.0
READER_LIMITS = PeerLimits(messages=100_000)
"""Message budget of a reader, as at the learner's endpoint."""


@dataclass
class RelayKeys:
    """A server's own pair as the keys of an endpoint of its own, at which other servers fetch weights."""

    secret: bytes = field(repr=False)
    peers: frozenset[bytes] = frozenset()
    """Public keys of the servers that may connect, as the learner has named them last."""
    where: str = "the keys that the learner has named"

    def authorised(self) -> frozenset[bytes]:
        return self.peers


class Relay:
    """Belongs to one event loop. Raises BindError, or KeyFileError, where it cannot listen."""

    def __init__(self, network: NetworkConfig):
        """Listen at the address that this machine has on its way to the learner, on a free port."""
        self._keys = RelayKeys(read_server_keys(Path(network.keys_dir)).secret) if network.keys_dir else None
        self._context = zmq.Context()
        self._authenticator = CurveAuthenticator(self._context, self._keys) if self._keys else None
        try:
            self._socket = LearnerSocket(
                endpoint_of(address_towards(network.control_endpoint), 0),
                (ChunkRequest,),
                setting="network.weights_port",
                inbound=REQUEST_LIMITS,
                insecure=network.insecure,
                authenticator=self._authenticator,
                queues=CHUNK_QUEUES,
                peer_limits=READER_LIMITS,
                context=self._context,
            )
        except BindError:
            self._close_context()
            raise
        self.endpoint = self._socket.endpoint
        self.key = zmq.curve_public(self._keys.secret).decode() if self._keys else ""
        self.sent_bytes = 0
        """Bytes of weights that others have fetched here."""
        self._pollable: zmq.asyncio.Socket = zmq.asyncio.Socket.shadow(self._socket.socket.underlying)
        self._offers: list[RelayedDownload] = []
        """The newest version, and the one before while somebody fetches it."""
        self._read_at = -KEPT_S
        """Time of the last request for the version before the newest."""
        self._waiting: dict[tuple[bytes, int], ChunkRequest] = {}
        """Requests that wait for bytes, by connection and offset."""
        self._told_at: dict[bytes, float] = {}
        """Time at which a waiting connection was last told so, or began to wait."""
        self._task = asyncio.create_task(self._serve())

    def admit(self, peer_keys: Collection[str]) -> None:
        """Let the holders of these keys (Z85) fetch from here, and no others."""
        if self._keys is not None:
            self._keys.peers = frozenset(key.encode() for key in peer_keys)

    def offer(self, download: RelayedDownload) -> None:
        """Send this version on from now on, as it arrives. The one before goes as soon as nobody fetches it."""
        self._offers = [download, *self._offers[:1]]
        self._read_at = time.monotonic()
        download.on_verified = self._work

    def withdraw(self, download: RelayedDownload) -> None:
        """Send no more of a version that will not be complete."""
        if download in self._offers:
            self._offers.remove(download)
            self._work()

    async def _serve(self) -> None:
        while True:
            await self._pollable.poll(round(1000 * LOOK_EVERY_S))
            self._work()

    def _work(self) -> None:
        """Answer what has arrived, and what has waited. Sending may swallow the wake-up for a message that comes
        meanwhile, so every turn reads, too."""
        if self._socket.socket.closed:
            return
        taken = 0
        for received in self._socket.turn():
            taken += 1
            if isinstance(received, Received) and isinstance(received.message, ChunkRequest):
                self._answer(received.identity, received.message)
        for (identity, _), request in list(self._waiting.items()):
            self._answer(identity, request)
        self._console()
        if len(self._offers) > 1 and time.monotonic() - self._read_at > KEPT_S:
            self._offers.pop()
        if taken >= TURN_MESSAGES:
            asyncio.get_running_loop().call_soon(self._work)

    def _answer(self, identity: bytes, request: ChunkRequest) -> None:
        """Send the bytes, or the reason why not, or let the request wait."""
        place = (identity, request.offset)
        try:
            chunk = self._read(request)
        except ProtocolError as error:
            self._waiting.pop(place, None)
            self._socket.send(identity, Error(code=error.code, reason=error.reason, version=request.version))
            return
        if chunk is None:
            if len(self._waiting) < MOST_WAITING:
                self._waiting[place] = request
            return
        crash_point("weights.relaying")
        self._waiting.pop(place, None)
        if self._socket.send(identity, chunk) is Delivery.SENT:
            self.sent_bytes += chunk.data.nbytes

    def _console(self) -> None:
        """Tell those who wait, once a second, that this server is alive."""
        now = time.monotonic()
        waiting = {identity: request.version for (identity, _), request in self._waiting.items()}
        self._told_at = {identity: at for identity, at in self._told_at.items() if identity in waiting}
        for identity, version in waiting.items():
            if now - self._told_at.setdefault(identity, now) < LOOK_EVERY_S:
                continue
            self._told_at[identity] = now
            reason = f"version {version} is still on its way to this server"
            answer = Error(code=ErrorCode.NOT_YET, reason=reason, version=version)
            if self._socket.send(identity, answer) is not Delivery.SENT:  # it has gone
                self._waiting = {place: asked for place, asked in self._waiting.items() if place[0] != identity}

    def _read(self, request: ChunkRequest) -> Chunk | None:
        """The bytes; None while they have not arrived. Raises ProtocolError."""
        check_size(request)
        for place, download in enumerate(self._offers):
            manifest = download.manifest
            if (manifest.version, manifest.publication) == (request.version, request.publication):
                if place:
                    self._read_at = time.monotonic()
                data = download.read(request.offset, request.nbytes)
                return None if data is None else Chunk(version=request.version, offset=request.offset, data=data)
        has = ", ".join(str(download.manifest.version) for download in self._offers) or "none"
        raise ProtocolError(
            ErrorCode.VERSION_GONE, f"this server has not got version {request.version} of that learner; it has {has}"
        )

    def close(self) -> None:
        self._task.cancel()
        self._offers.clear()
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        self._socket.close()
        self._context.term()

    def _close_context(self) -> None:
        with suppress(zmq.ZMQError):
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.term()
