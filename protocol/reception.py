"""What arrived on a socket: decoded and counted, or a `BadMessage` with the answer for its sender."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.codec import Expected, Frame, Limits, decode, read_header
from protocol.errors import ErrorCode, ProtocolError
from protocol.handshake import refusal_for_undecodable_hello
from protocol.messages import Error, Message, Refusal


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
