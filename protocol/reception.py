"""What arrived on a socket: taken, decoded and counted, or a `BadMessage` with the answer for its sender."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from protocol.codec import Expected, Frame, Limits, decode, read_header
from protocol.errors import ErrorCode, ProtocolError
from protocol.handshake import refusal_for_undecodable_hello
from protocol.held import ReceiveMemoryGuard
from protocol.messages import Error, Message, Refusal

SKIPPED_AT_ONCE = 1 << 16
"""Frames, about 0.1 s of work. A message with so many too many costs its sender the connection."""


@dataclass
class WireCounters:
    """Totals since the socket was made; services export them."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    undelivered: int = 0
    """Messages that found no peer, or a full queue."""
    dropped: int = 0
    """Messages of muted peers."""
    errors: Counter[ErrorCode] = field(default_factory=Counter)
    """Received messages that could not be used."""


@dataclass(frozen=True)
class BadMessage:
    """Something that could not be decoded."""

    identity: bytes
    """Routing id of the sender; empty at a DEALER."""
    error: ProtocolError
    answer: Error | Refusal | None
    """What to tell the sender; None if it sent an error itself, because two peers must not argue forever."""


class MessageReader:
    """Takes messages from a socket, of each at most one frame more than `max_frames` allows: the rest is skipped."""

    def __init__(self, sock: zmq.Socket, max_frames: int, held: ReceiveMemoryGuard, *, routed: bool):
        self._sock = sock
        self._most = max_frames + 1
        self._held = held
        self._routed = routed
        """The first frame is the identity of the sender, and ZeroMQ's own."""
        self._skipping = False

    def take(self) -> list[zmq.Frame] | None:
        """The next message, with its sender's identity if routed, or None if there is none at the moment."""
        look = self._held.looks
        if self._skipping and not self._skip():
            return None
        frames = []
        try:
            if self._routed:
                frames.append(self._sock.recv(zmq.NOBLOCK, copy=False))
            first = frame = self._sock.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._held.found_empty(look)
            return None
        body = [first]
        while frame.more and len(body) < self._most:
            frame = self._sock.recv(copy=False)  # ZeroMQ hands out whole messages: the frame is there
            body.append(frame)
        self._held.took(body)
        self._skipping = frame.more
        if self._skipping:
            self._skip()
        return frames + body

    def _skip(self) -> bool:
        """Drop frames of the message at hand. True once it has ended."""
        skipped = []
        while self._skipping and len(skipped) < SKIPPED_AT_ONCE:
            skipped.append(self._sock.recv(copy=False))
            self._skipping = skipped[-1].more
        self._held.took(skipped)
        if self._skipping:
            self._held.end(skipped[-1], f"a message of over {len(skipped):,} frames")
        return not self._skipping


def read_frames(
    identity: bytes, frames: Sequence[Frame], expected: Expected, limits: Limits, counters: WireCounters
) -> Message | BadMessage:
    counters.messages_in += 1
    counters.bytes_in += sum(map(len, frames))
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


def count_sent(counters: WireCounters, frames: list[bytes | memoryview]) -> None:
    counters.messages_out += 1
    counters.bytes_out += sum(memoryview(frame).nbytes for frame in frames)
