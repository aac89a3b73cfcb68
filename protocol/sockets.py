"""The learner's ROUTER, and a rollout server's DEALER for asyncio.

Both decode what they receive; what cannot be decoded is returned as a `BadMessage`, never raised. Memory is bounded by
ZeroMQ's own options: the bytes of a frame (MAXMSGSIZE) and the number of queued messages (high-water marks).
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
import zmq.asyncio

from protocol.codec import Expected, Frame, Limits, decode, encode, read_header
from protocol.curve import CurveAuthenticator, HandshakeWatch, ServerKeys, become_curve_client
from protocol.endpoints import bind, check_dial
from protocol.errors import ErrorCode, ProtocolError
from protocol.handshake import Muted, PeerBudget, PeerLimits, refuse_other_protocol
from protocol.messages import Error, Message, Refusal, Wire

SLOWEST_TURN_S = 2.0
"""Longest regular time between two looks for messages, beyond what a look waits for them."""


class Stalls:
    """How far the time between two looks for messages exceeds what is regular: every `heard_at` is moved by it.

    Example:
        stalls = Stalls(wait_s + SLOWEST_TURN_S)
        heard_at += stalls.look(time.monotonic())  # in each turn
    """

    def __init__(self, regular_s: float):
        self._regular_s = regular_s
        self.looked_at = float("inf")
        """Monotonic time of the last look; infinite before the first."""

    def look(self, now: float) -> float:
        """Seconds of a stall since the last look; 0 where there was none."""
        stalled_s = max(0.0, now - self.looked_at - self._regular_s)
        self.looked_at = now
        return stalled_s


LINGER_S = 1.0
"""Longest that closing a socket waits for unsent messages."""
HANDSHAKE_S = 10.0
"""Longest that a connection may take to authenticate."""
TURN_MESSAGES = 16
TURN_S = 0.2
"""An iteration takes so many messages or seconds, whichever is first: heartbeats must go out between iterations.

Short iterations keep both sides busy: the groups of the next one arrive while those of this one are journaled.
"""
POLL_S = 0.1
"""Longest single wait of a server for a message.

Our reads bypass asyncio and may consume the wake-up that a pending send waits for; each new wait looks again.
"""


@dataclass(frozen=True)
class Queues:
    """High-water marks per peer, in messages. A full receive queue makes the sender wait, so it may be short."""

    send: int
    receive: int


CONTROL_QUEUES = Queues(send=256, receive=32)
"""Queues of the learner's control socket. Acknowledgements come in bursts; admission bounds the bulk (tickets)."""
CHUNK_QUEUES = Queues(send=64, receive=32)
"""Queues of the learner's weights socket: chunks waiting for a slow reader, hence the largest useful `window`."""
SERVER_QUEUES = Queues(send=32, receive=64)
"""Queues of a rollout server's sockets."""


@dataclass(frozen=True)
class Received:
    """A message from one peer."""

    identity: bytes
    """Routing id of the connection; a peer that reconnects gets a new one."""
    message: Message
    frames: Sequence[Frame]
    """The frames that the message was decoded from."""


@dataclass(frozen=True)
class BadMessage:
    """Frames that could not be decoded."""

    identity: bytes
    """Routing id of the sender; empty at a DEALER."""
    error: ProtocolError
    answer: Error | Refusal | None
    """Answer for the sender; None if it sent an error itself, because two peers must not argue forever."""
    ticket_id: int | None = None
    """The ticket, where it is a group whose header can be read."""


class Delivery(StrEnum):
    """Outcome of `LearnerSocket.send`."""

    SENT = "sent"
    """Handed to the network. Only the protocol's own answers tell that it arrived."""
    UNREACHABLE = "unreachable"
    """No such connection: the peer has gone, or has come back under another identity."""
    QUEUE_FULL = "queue_full"
    """The peer does not read; its queue has reached the high-water mark."""


class SendTimeout(TimeoutError):
    """The learner took no message in time."""


@dataclass(frozen=True)
class Encoded:
    """A message as frames, for sending it to many peers: a manifest costs milliseconds to encode."""

    frames: Sequence[bytes | memoryview]


class LearnerSocket:
    """A bound ROUTER for one thread; register `socket` with a zmq.Poller.

    With an `authenticator` (of the same context) it is a CURVE server, and only holders of known keys may connect.
    `setting` is the configuration key of the port, for error messages. `inbound` limits received messages where they
    may be smaller than sent ones. Raises `endpoints.BindError`.
    """

    def __init__(
        self,
        endpoint: str,
        expected: Expected,
        limits: Limits | None = None,
        *,
        setting: str,
        inbound: Limits | None = None,
        insecure: bool = False,
        authenticator: CurveAuthenticator | None = None,
        queues: Queues = CONTROL_QUEUES,
        peer_limits: PeerLimits | None = None,
        linger_s: float = LINGER_S,
        context: zmq.Context | None = None,
    ):
        self.limits = limits or Limits()
        self.dropped = 0
        """Messages of muted peers, dropped without being decoded."""
        self._expected = expected
        self._inbound = inbound or self.limits
        self._budget = PeerBudget(peer_limits)
        self._newly_muted: deque[Muted] = deque()
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        _configure(self.socket, self._inbound, queues, linger_s)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if authenticator is not None:
            authenticator.guard(self.socket)
        try:
            self.endpoint = bind(self.socket, endpoint, setting=setting, private=insecure or authenticator is not None)
        except ValueError:
            self.socket.close(linger=0)
            raise

    def recv(self, timeout_s: float = 0.0) -> Received | BadMessage | None:
        """The next message, or None after `timeout_s`. The sender of a bad message has been answered already."""
        if timeout_s > 0:
            self.socket.poll(round(timeout_s * 1000))
        arrived = self._take()
        return self._read(*arrived) if arrived is not None else None

    def turn(self) -> Iterator[Received | BadMessage | Muted]:
        """The messages that have arrived, within the bounds of an iteration; the rest waits for the next. Never waits.

        Peers over their budget are skipped, and reported once as `Muted`: give their tickets to others.
        """
        ends_at = time.monotonic() + TURN_S
        yield from self._take_muted()
        for _ in range(TURN_MESSAGES):
            arrived = self._take()
            if arrived is None:
                return
            sender, frames = arrived
            if self._budget.is_muted(sender):
                self.dropped += 1
                continue
            received = self._read(sender, frames)
            if isinstance(received, BadMessage) and received.error.code is not ErrorCode.UNKNOWN_TYPE:
                self.charge(sender)  # a newer peer may go on sending types that we do not know
            self._mute(self._budget.count(sender))
            yield received
            yield from self._take_muted()
            if time.monotonic() > ends_at:
                return

    def charge(self, identity: bytes) -> None:
        """Count a readable but useless message of this peer (a refused hello or group) as a bad one."""
        self._mute(self._budget.charge(identity))

    def encode(self, message: Wire) -> Encoded:
        """The message for `send`. Raises ProtocolError for one beyond the limits, or with odd values."""
        return Encoded(encode(message, self.limits))

    def send(self, identity: bytes, message: Wire | Encoded) -> Delivery:
        """Send without waiting. Raises ProtocolError for a message beyond the limits, or with odd values.

        Large frames are not copied: they must not change afterwards. (A copy costs a third of a weight transfer.)
        """
        frames = message.frames if isinstance(message, Encoded) else encode(message, self.limits)
        try:
            self.socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return Delivery.QUEUE_FULL
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            return Delivery.UNREACHABLE
        return Delivery.SENT

    def close(self) -> None:
        self.socket.close()

    def _mute(self, muted: Muted | None) -> None:
        if muted is not None:
            self._newly_muted.append(muted)
            self.send(muted.identity, Error(code=ErrorCode.MUTED, reason=muted.reason))

    def _take_muted(self) -> Iterator[Muted]:
        while self._newly_muted:
            yield self._newly_muted.popleft()

    def _take(self) -> tuple[bytes, list[zmq.Frame]] | None:
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return identity.bytes, frames

    def _read(self, sender: bytes, frames: list[zmq.Frame]) -> Received | BadMessage:
        try:
            return Received(sender, decode(frames, self._expected, self._inbound), frames)
        except ProtocolError as error:
            bad = _bad_message(sender, error, frames, self._inbound)
            if bad.answer is not None:
                self.send(sender, bad.answer)
            return bad


class ServerSocket:
    """A connected DEALER for an asyncio program. Any number of tasks may send, one may receive.

    ZeroMQ reconnects by itself, and then the learner does not know this server any more: it answers NOT_WELCOME
    until the next hello. Nothing is queued for a learner that is not connected.

    Without `keys` it dials loopback only, unless `insecure`. Raises `endpoints.InsecureBindError`.
    """

    def __init__(
        self,
        endpoint: str,
        expected: Expected,
        limits: Limits | None = None,
        *,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        queues: Queues = SERVER_QUEUES,
        linger_s: float = LINGER_S,
        context: zmq.asyncio.Context | None = None,
    ):
        if keys is None and not insecure:
            check_dial(endpoint)
        self.endpoint = endpoint
        self.limits = limits or Limits()
        self._expected = expected
        self._socket = (context or zmq.asyncio.Context.instance()).socket(zmq.DEALER)
        _configure(self._socket, self.limits, queues, linger_s)
        if keys is not None:
            become_curve_client(self._socket, keys)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._handshakes = HandshakeWatch(self._socket, endpoint, keys)
        self._plain = zmq.Socket.shadow(self._socket.underlying)
        """Plain socket beside the asyncio one: its reads never wait, and cost less."""
        self._socket.connect(endpoint)

    async def recv(self, timeout_s: float) -> Message | BadMessage | None:
        """The next message, or None after `timeout_s`. Safe to cancel: no message is lost."""
        await asyncio.sleep(0)  # other tasks go on while messages come without a pause
        deadline = time.monotonic() + timeout_s
        frames = self._take()  # before any wait, which costs more than a small message
        # Waiting and taking are separate: a cancelled wait could otherwise drop what it had just taken.
        while frames is None and (left_s := deadline - time.monotonic()) > 0:
            await self._socket.poll(round(1000 * min(left_s, POLL_S)))
            frames = self._take()
        if frames is None:
            return None
        try:
            return decode(frames, self._expected, self.limits)
        except ProtocolError as error:
            return _bad_message(b"", error, frames, self.limits)

    async def send(self, message: Wire, timeout_s: float) -> None:
        """Send one message. Raises SendTimeout if there is no connection, or the learner's queue stays full.

        Raises HandshakeRejected where there is no connection because the keys of the two sides do not fit, and
        ProtocolError for a message beyond the limits, or with odd values.
        """
        frames = encode(message, self.limits)
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(frames)
        except TimeoutError as problem:
            self.check_handshakes()
            raise SendTimeout(
                f"waited {timeout_s:g} s to send `{getattr(message, 'type', '?')}` to the learner at "
                f"{self.endpoint}: no connection, or its queue is full"
            ) from problem

    @property
    def connections(self) -> int:
        """Connections so far; one more than at the last look means that messages may have been lost between."""
        self._handshakes.look()
        return self._handshakes.connections

    def check_handshakes(self) -> None:
        """Raise HandshakeRejected where there is no connection because none can be made."""
        self._handshakes.check()

    def close(self) -> None:
        self._handshakes.close()
        self._socket.close()

    def _take(self) -> list[zmq.Frame] | None:
        try:
            return self._plain.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None


def _configure(sock: zmq.Socket, limits: Limits, queues: Queues, linger_s: float) -> None:
    sock.setsockopt(zmq.SNDHWM, queues.send)
    sock.setsockopt(zmq.RCVHWM, queues.receive)
    sock.setsockopt(zmq.LINGER, round(linger_s * 1000))
    sock.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    # libzmq hangs up on a longer frame before it has read it, so senders check first (see `encode`).
    sock.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _bad_message(sender: bytes, error: ProtocolError, frames: Sequence[Frame], limits: Limits) -> BadMessage:
    """Choose the answer: a refusal for a hello of another protocol, nothing for an error, else an error."""
    try:
        header = read_header(frames, limits)
    except ProtocolError:
        header = {}  # not readable at all, so not an error message of ours either
    answer: Error | Refusal | None = refuse_other_protocol(header)
    ticket_id = header.get("ticket_id") if header.get("type") == "group" else None
    if type(ticket_id) is not int or not 0 <= ticket_id < 2**63:
        ticket_id = None
    if answer is None and header.get("type") != "error":
        answer = Error(code=error.code, reason=error.reason, ticket_id=ticket_id)
    return BadMessage(sender, error, answer, ticket_id)
