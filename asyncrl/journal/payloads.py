"""A group as one piece of bytes: what the journal keeps."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import zmq

from asyncrl.errors import BadStateError
from protocol.codec import Frame, Limits, decode
from protocol.errors import ProtocolError
from protocol.messages import Group

WORD = 4
"""Bytes of one int32 or float32."""
SHORT = 256
"""Bytes of a frame that is kept as it is."""


def pack_frames(frames: Sequence[Frame]) -> list[bytes | memoryview]:
    """What the journal keeps, in pieces: the frames' number, their sizes here and in full, their bytes.

    A column that repeats one value (the versions between two updates, a mask without tools) is kept as that value.
    """
    full = [frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame) for frame in frames]
    kept = [full[0], *(_without_repetition(frame) for frame in full[1:])]
    sizes = [size for pair in zip(kept, full, strict=True) for size in (pair[0].nbytes, pair[1].nbytes)]
    return [struct.pack(f"<I{len(sizes)}Q", len(full), *sizes), *kept]


def _without_repetition(frame: memoryview) -> memoryview:
    """The first WORD bytes of a frame that is nothing but their repetition."""
    if frame.nbytes < SHORT or frame.nbytes % WORD or frame[:WORD] != frame[-WORD:]:
        return frame
    words = np.frombuffer(frame, np.uint32)
    return frame[:WORD] if words.min() == words.max() else frame


def unpack_group(payload: bytes) -> Group:
    """Arrays are views of `payload`, but for the repetitive ones."""
    view = memoryview(payload)
    (count,) = struct.unpack_from("<I", view)
    sizes = struct.unpack_from(f"<{2 * count}Q", view, 4)
    start = 4 + 16 * count
    frames: list[memoryview] = []
    for kept, full in zip(sizes[::2], sizes[1::2], strict=True):
        frame = view[start : start + kept]
        frames.append(frame if kept == full else memoryview(bytes(frame) * (full // WORD)))
        start += kept
    try:
        group = decode(frames, (Group,), Limits(max_message_bytes=sum(sizes[1::2])))
    except ProtocolError as problem:
        raise BadStateError(f"a group in the journal cannot be read by this version of asyncrl: {problem}") from problem
    assert isinstance(group, Group)
    return group
