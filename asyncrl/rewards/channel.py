"""Messages between pool and worker: MessagePack maps behind a 4-byte little-endian length.

    once        to worker   {"memory_limit_mib", "components": [{"name", "function", "kwargs", "path", ...}]}
                to pool     {"ready": True} or {"ready": False, "message"}
    per sample  to worker   {"id", "sample"}
                to pool     {"id", "seconds", "components"}, on failure also {"error_kind", "error_message"}

Beside the pipes there is one small shared file, the *progress*: before each component the worker writes
which sample and component it begins, so that the pool can name the culprit after killing the worker.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

import msgpack

LENGTH = struct.Struct("<I")
PROGRESS = struct.Struct("<QI")
"""Sample id, index of the component."""
MAX_REPLY_BYTES = 1 << 20
"""A longer reply did not come from our worker loop."""


def pack(message: dict[str, Any]) -> bytes:
    """A message as a frame. Raises TypeError, ValueError or OverflowError for what MessagePack cannot carry."""
    body = msgpack.packb(message, unicode_errors="surrogatepass")
    assert body is not None  # None only from a Packer with autoreset off
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """The message of a frame's body. Raises ValueError if it is not a MessagePack map."""
    message = msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)
    if not isinstance(message, dict):
        raise ValueError(f"expected a map, got {type(message).__name__}")
    return message


def read_frame(stream: BinaryIO) -> bytes | None:
    """Block for the next frame; None once the other side has closed."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_progress(fd: int, sample_id: int, component: int) -> None:
    os.pwrite(fd, PROGRESS.pack(sample_id, component), 0)


def read_progress(fd: int) -> tuple[int, int]:
    """Sample id and component index begun last; (0, 0) before the first sample: ids start at 1."""
    data = os.pread(fd, PROGRESS.size, 0)
    return PROGRESS.unpack(data) if len(data) == PROGRESS.size else (0, 0)
