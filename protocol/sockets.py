"""The two kinds of sockets: the learner's ROUTER and a rollout server's DEALER.

Both decode what they receive; what cannot be decoded comes back as a `BadMessage` and is counted:
nothing dies.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

import zmq
import zmq.asyncio

from protocol.codec import Expected, Frame, Limits, decode, encode, read_header
from protocol.endpoints import bind
from protocol.errors import ErrorCode, ProtocolError
from protocol.handshake import refusal_for_undecodable_hello
from protocol.messages import Error, Message, Refusal, Wire

QUEUED_MESSAGES = 1000
"""High-water mark per peer and direction, in messages."""
LINGER_S = 1.0
"""Longest that closing a socket waits for unsent messages."""


@dataclass
class WireCounters:
    """Totals since the socket was made; services export them."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    undelivered: int = 0
    """Messages that found no peer, or a full queue."""
    errors: Counter[ErrorCode] = field(default_factory=Counter)
    """Received messages that could not be used."""


@dataclass(frozen=True)
class Received:
    """A message from one peer."""

    identity: bytes
    """Routing id of the connection; a peer that reconnects gets a new one."""
    message: Message


@dataclass(frozen=True)
class BadMessage:
    """Something that could not be decoded."""

    identity: bytes
    """Routing id of the sender; empty at a DEALER."""
    error: ProtocolError
    answer: Error | Refusal | None
    """What to tell the sender; None if it sent an error itself, because two peers must not argue forever."""


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

    `setting` is the configuration key of the port, for error messages. Raises `endpoints.BindError`.
    """

    def __init__(
        self,
        endpoint: str,
        expected: Expected,
        limits: Limits | None = None,
        *,
        setting: str,
        insecure: bool = False,
        queued_messages: int = QUEUED_MESSAGES,
        linger_s: float = LINGER_S,
        context: zmq.Context | None = None,
    ):
        self.limits = limits or Limits()
        self.counters = WireCounters()
        self._expected = expected
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        _configure(self.socket, self.limits, queued_messages, linger_s)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.endpoint = bind(self.socket, endpoint, setting=setting, insecure=insecure)
        except ValueError:
            self.socket.close(linger=0)
            raise

    def recv(self, timeout_s: float = 0.0) -> Received | BadMessage | None:
        """The next message, or None after `timeout_s`. The sender of a bad message has been told already."""
        if timeout_s > 0 and not self.socket.poll(round(timeout_s * 1000)):
            return None
        try:
            identity, *frames = self.socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        sender = identity.bytes
        received = _decode(sender, frames, self._expected, self.limits, self.counters)
        if isinstance(received, BadMessage):
            if received.answer is not None:
                self.send(sender, received.answer)
            return received
        return Received(sender, received)

    def send(self, identity: bytes, message: Wire) -> Delivery:
        """Never waits. Raises ProtocolError for a message beyond the limits, or with odd values."""
        frames = encode(message, self.limits)
        try:
            self.socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            self.counters.undelivered += 1
            return Delivery.QUEUE_FULL
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            self.counters.undelivered += 1
            return Delivery.UNREACHABLE
        _count_sent(self.counters, frames)
        return Delivery.SENT

    def close(self) -> None:
        self.socket.close()


class ServerSocket:
    """A connected DEALER for an asyncio program. Any number of tasks may send, one may receive.

    ZeroMQ reconnects by itself, and then the learner does not know us any more: it answers NOT_WELCOME
    until we say hello again. Nothing is queued for a learner that is not there.
    """

    def __init__(
        self,
        endpoint: str,
        expected: Expected,
        limits: Limits | None = None,
        *,
        queued_messages: int = QUEUED_MESSAGES,
        linger_s: float = LINGER_S,
        context: zmq.asyncio.Context | None = None,
    ):
        self.endpoint = endpoint
        self.limits = limits or Limits()
        self.counters = WireCounters()
        self._expected = expected
        self._socket = (context or zmq.asyncio.Context.instance()).socket(zmq.DEALER)
        _configure(self._socket, self.limits, queued_messages, linger_s)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.connect(endpoint)

    async def recv(self, timeout_s: float) -> Message | BadMessage | None:
        """The next message, or None after `timeout_s`. Safe to cancel: no message is lost."""
        await asyncio.sleep(0)  # other tasks go on while messages come without a pause
        frames = await self._take()  # before any wait, which costs more than a small message
        # Waiting and taking are separate: a cancelled wait could otherwise drop what it had just taken.
        if frames is None and await self._socket.poll(max(0, round(timeout_s * 1000))):
            frames = await self._take()
        if frames is None:
            return None
        return _decode(b"", frames, self._expected, self.limits, self.counters)

    async def _take(self) -> list[zmq.Frame] | None:
        """The frames of a message that is there, without waiting."""
        try:
            return cast(list[zmq.Frame], await self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return None

    async def send(self, message: Wire, timeout_s: float) -> None:
        """Raises SendTimeout if there is no connection, or the learner's queue stays full.

        Raises ProtocolError for a message beyond the limits, or with odd values.
        """
        frames = encode(message, self.limits)
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(frames)
        except TimeoutError as problem:
            self.counters.undelivered += 1
            raise SendTimeout(
                f"waited {timeout_s:g} s to send `{getattr(message, 'type', '?')}` to the learner at "
                f"{self.endpoint}: no connection, or its queue is full"
            ) from problem
        _count_sent(self.counters, frames)

    def close(self) -> None:
        self._socket.close()


def _configure(sock: zmq.Socket, limits: Limits, queued_messages: int, linger_s: float) -> None:
    sock.setsockopt(zmq.SNDHWM, queued_messages)
    sock.setsockopt(zmq.RCVHWM, queued_messages)
    sock.setsockopt(zmq.LINGER, round(linger_s * 1000))
    # libzmq hangs up on a longer frame before it has read it, so senders check first (see `encode`).
    sock.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        sock.setsockopt(option, value)


def _decode(
    identity: bytes, frames: Sequence[Frame], expected: Expected, limits: Limits, counters: WireCounters
) -> Message | BadMessage:
    counters.messages_in += 1
    counters.bytes_in += sum(len(frame) for frame in frames)
    try:
        return decode(frames, expected, limits)
    except ProtocolError as error:
        counters.errors[error.code] += 1
        return BadMessage(identity, error, _answer(error, frames, limits))


def _answer(error: ProtocolError, frames: Sequence[Frame], limits: Limits) -> Error | Refusal | None:
    refusal = refusal_for_undecodable_hello(frames, limits)
    if refusal is not None:
        return refusal
    try:
        if read_header(frames, limits).get("type") == "error":
            return None
    except ProtocolError:
        pass  # not readable at all, so not an error message of ours either
    return Error(code=error.code, reason=error.reason)


def _count_sent(counters: WireCounters, frames: list[bytes | memoryview]) -> None:
    counters.messages_out += 1
    counters.bytes_out += sum(memoryview(frame).nbytes for frame in frames)
