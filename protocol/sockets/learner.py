"""The learner's ROUTER, for one thread; it takes what arrives in short turns."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq

from protocol.codec import Expected, Frame, Limits, encode
from protocol.curve import LearnerKeys
from protocol.curve_auth import CurveAuthenticator
from protocol.endpoints import bind, split_endpoint
from protocol.errors import ErrorCode
from protocol.held import Allowance, ReceiveMemoryGuard
from protocol.messages import Error, Message, Wire
from protocol.monitor import SocketMonitor
from protocol.peers import Muted, PeerBudget, PeerLimits
from protocol.reception import BadMessage, MessageReader, WireCounters, count_sent, read_frames
from protocol.socket_options import CONTROL_QUEUES, LINGER_S, Queues, become_curve_server, configure

TURN_MESSAGES = 16
TURN_S = 0.2
"""A turn ends after so many messages or seconds, whichever is first: heartbeats must go out between turns.

Short turns keep both sides busy: the groups of the next one arrive while those of this one are journaled.
"""
TURN_DROPPED = 8
PAUSE_S = 0.001
"""After so many messages of muted peers in a turn a short sleep lets ZeroMQ slow them down at their end."""


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
        gate: CurveAuthenticator | None = None,
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
        self._held = ReceiveMemoryGuard(
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
