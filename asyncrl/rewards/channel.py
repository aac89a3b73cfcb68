"""Messages between pool and worker: MessagePack maps behind a 4-byte little-endian length.

once        to worker   {"memory_limit_mib", "components": [{"name", "function", "kwargs", "path", ...}]}
            to pool     {"ready": True} or {"ready": False, "message"}
per sample  to worker   {"id", "sample"}
            to pool     {"begun"} before each component: its index, by which a killed worker's culprit is named
                        {"id", "seconds", "components"}, on failure also {"error_kind", "error_message"}
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import msgpack

LENGTH = struct.Struct("<I")
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
