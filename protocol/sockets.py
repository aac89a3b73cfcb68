"""The two kinds of sockets: the learner's ROUTER and a rollout server's DEALER.

Both decode what they receive; what cannot be decoded comes back as a `BadMessage` and is counted:
nothing dies.
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

from protocol.codec import Expected, Frame, Limits, encode
from protocol.curve import LearnerKeys, ServerKeys
from protocol.endpoints import bind, check_dial, split_endpoint
from protocol.errors import ErrorCode
from protocol.gate import Gate, HandshakeWatch
from protocol.held import Allowance, HeldWatch
from protocol.messages import Error, Message, Wire
from protocol.monitor import SocketMonitor
from protocol.peers import Muted, PeerBudget, PeerLimits
from protocol.reception import BadMessage, MessageReader, WireCounters, count_sent, read_frames
from protocol.socket_options import (
    CONTROL_QUEUES,
    LINGER_S,
    SERVER_QUEUES,
    Queues,
    become_curve_client,
    become_curve_server,
    configure,
)

TURN_MESSAGES = 16
TURN_S = 0.2
"""A turn ends after so many messages or seconds, whichever is first: heartbeats must go out between turns.

Short turns keep both sides busy: the groups of the next one arrive while those of this one are journaled.
"""
TURN_DROPPED = 8
PAUSE_S = 0.001
"""After so many messages of muted peers in a turn a short sleep lets ZeroMQ slow them down at their end."""


WAIT_S = 0.1
"""A socket that says nothing is looked at so often, which shows that whatever ZeroMQ holds is unfinished."""


@dataclass(frozen=True)
class Received:
    """A message from one peer."""

    identity: bytes
    """Routing id of the connection; a peer that reconnects gets a new one."""
    message: Message
    frames: Sequence[Frame]
    """What the message was read from."""


class Delivery(StrEnum):
    """What became of a message given to `LearnerSocket.send`."""

    SENT = "sent"
    """Handed to the network. Only the protocol's own answers tell that it arrived."""
    UNREACHABLE = "unreachable"
    """No such connection: the peer has gone, or has come back under another identity."""
    QUEUE_FULL = "queue_full"
    """The peer does not read; its queue has reached the high-water mark."""


class SendTimeout(TimeoutError):
    """The learner took no message in time."""


class LearnerSocket:
    """A bound ROUTER for one thread; register `socket` with a zmq.Poller.

    With `keys` it is a CURVE server whose clients are let in by `gate`, of the same context.
    `setting` is the configuration key of the port, for error messages. `inbound` are the limits of what arrives, if
    others than of what is sent. Raises `endpoints.BindError`.
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
        keys: LearnerKeys | None = None,
        gate: Gate | None = None,
        queues: Queues = CONTROL_QUEUES,
        peer_limits: PeerLimits | None = None,
        linger_s: float = LINGER_S,
        context: zmq.Context | None = None,
    ):
        self.limits = limits or Limits()
        self.counters = WireCounters()
        self._expected = expected
        self._inbound = inbound or self.limits
        self._budget = PeerBudget(peer_limits)
        self._newly_muted: deque[Muted] = deque()
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        configure(self.socket, self._inbound, queues, linger_s)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = SocketMonitor(self.socket)
        if keys is not None:
            assert gate is not None, "libzmq lets everybody in who knows the learner's public key if nobody is asked"
            become_curve_server(self.socket, keys)
            gate.watch(self._monitor)
        try:
            self.endpoint = bind(self.socket, endpoint, setting=setting, private=insecure or keys is not None)
        except ValueError:
            self._monitor.close()
            self.socket.close(linger=0)
            raise
        curve = keys is not None
        self._held = HeldWatch(
            self._monitor,
            Allowance.of(self._inbound, queues, curve=curve),
            curve=curve,
            port=split_endpoint(self.endpoint)[1],
            bound=True,
        )
        self._reader = MessageReader(self.socket, self._inbound.max_frames, self._held, routed=True)

    def recv(self, timeout_s: float = 0.0) -> Received | BadMessage | None:
        """The next message, or None after `timeout_s`. The sender of a bad message has been told already."""
        if timeout_s > 0:
            self.socket.poll(round(timeout_s * 1000))
        arrived = self._take()
        return self._read(*arrived) if arrived is not None else None

    def turn(self) -> Iterator[Received | BadMessage | Muted]:
        """What has arrived, within the bounds of a turn; the rest waits for the next one. Never waits itself.

        Peers over their budget are skipped, and reported once as `Muted`: forget what was entrusted to them.
        """
        ends_at = time.monotonic() + TURN_S
        dropped = 0
        yield from self._take_muted()
        for _ in range(TURN_MESSAGES):
            arrived = self._take()
            if arrived is None:
                return
            sender, frames = arrived
            if self._budget.is_muted(sender):
                self.counters.dropped += 1
                dropped += 1
                if dropped >= TURN_DROPPED:
                    time.sleep(PAUSE_S)
                    return
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
        """A message of this peer was readable and still of no use (a refused group): it counts as a bad one."""
        self._mute(self._budget.charge(identity))

    def _mute(self, muted: Muted | None) -> None:
        if muted is not None:
            self._newly_muted.append(muted)
            self.send(muted.identity, Error(code=ErrorCode.MUTED, reason=muted.reason))

    def _take_muted(self) -> Iterator[Muted]:
        while self._newly_muted:
            yield self._newly_muted.popleft()

    def _take(self) -> tuple[bytes, list[zmq.Frame]] | None:
        arrived = self._reader.take()
        if arrived is None:
            return None
        identity, *frames = arrived
        return identity.bytes, frames

    def take_ended(self) -> int:
        """Connections ended since the last call, because ZeroMQ held too much for them (see `held`)."""
        return self._held.take_ended()

    def _read(self, sender: bytes, frames: list[zmq.Frame]) -> Received | BadMessage:
        received = read_frames(sender, frames, self._expected, self._inbound, self.counters)
        if isinstance(received, BadMessage):
            if received.answer is not None:
                self.send(sender, received.answer)
            return received
        return Received(sender, received, frames)

    def send(self, identity: bytes, message: Wire) -> Delivery:
        """Never waits. Raises ProtocolError for a message beyond the limits, or with odd values.

        Large frames are not copied: they must not change afterwards. (A copy costs a third of a weight transfer.)
        """
        frames = encode(message, self.limits)
        try:
            self.socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.counters.undelivered += 1
            return Delivery.QUEUE_FULL
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            self.counters.undelivered += 1
            return Delivery.UNREACHABLE
        count_sent(self.counters, frames)
        return Delivery.SENT

    def close(self) -> None:
        self._held.close()
        self._monitor.close()
        self.socket.close()


class ServerSocket:
    """A connected DEALER for an asyncio program. Any number of tasks may send, one may receive.

    ZeroMQ reconnects by itself, and then the learner does not know us any more: it answers NOT_WELCOME
    until we say hello again. Nothing is queued for a learner that is not there.

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
        self.counters = WireCounters()
        self._expected = expected
        self._socket = (context or zmq.asyncio.Context.instance()).socket(zmq.DEALER)
        configure(self._socket, self.limits, queues, linger_s)
        if keys is not None:
            become_curve_client(self._socket, keys)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor = SocketMonitor(self._socket)
        self._handshakes = HandshakeWatch(self._monitor, endpoint, keys)
        curve = keys is not None
        self._held = HeldWatch(
            self._monitor,
            Allowance.of(self.limits, queues, curve=curve),
            curve=curve,
            port=split_endpoint(endpoint)[1],
            bound=False,
        )
        # A plain socket, also where `_socket` belongs to asyncio: these reads never wait.
        plain = zmq.Socket.shadow(self._socket.underlying)
        self._reader = MessageReader(plain, self.limits.max_frames, self._held, routed=False)
        self._socket.connect(endpoint)

    async def recv(self, timeout_s: float) -> Message | BadMessage | None:
        """The next message, or None after `timeout_s`. Safe to cancel: no message is lost."""
        await asyncio.sleep(0)  # other tasks go on while messages come without a pause
        deadline = time.monotonic() + timeout_s
        frames = self._reader.take()  # before any wait, which costs more than a small message
        # Waiting and taking are separate: a cancelled wait could otherwise drop what it had just taken.
        while frames is None and (left_s := deadline - time.monotonic()) > 0:
            await self._socket.poll(round(1000 * min(left_s, WAIT_S)))
            frames = self._reader.take()
        if frames is None:
            return None
        return read_frames(b"", frames, self._expected, self.limits, self.counters)

    async def send(self, message: Wire, timeout_s: float) -> None:
        """Raises SendTimeout if there is no connection, or the learner's queue stays full.

        Raises HandshakeRejected where there is no connection because the keys of the two sides do not fit, and
        ProtocolError for a message beyond the limits, or with odd values.
        """
        frames = encode(message, self.limits)
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(frames)
        except TimeoutError as problem:
            self.counters.undelivered += 1
            self.check_handshakes()
            raise SendTimeout(
                f"waited {timeout_s:g} s to send `{getattr(message, 'type', '?')}` to the learner at "
                f"{self.endpoint}: no connection, or its queue is full"
            ) from problem
        count_sent(self.counters, frames)

    def check_handshakes(self) -> None:
        """Raises HandshakeRejected where there is no connection because none can be made."""
        self._handshakes.check()

    def take_ended(self) -> int:
        """Connections ended since the last call, because ZeroMQ held too much for them (see `held`)."""
        return self._held.take_ended()

    def close(self) -> None:
        self._held.close()
        self._monitor.close()
        self._socket.close()
