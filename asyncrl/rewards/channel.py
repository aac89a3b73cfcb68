"""Messages between pool and worker: MessagePack maps, one behind the other.

once        to worker   {"memory_limit_mib", "components": [{"name", "function", "kwargs", "path", ...}]}
            to pool     {"ready": True} or {"ready": False, "message"}
per sample  to worker   {"id", "sample"}
            to pool     {"begun"} before each component: its index, by which a killed worker's culprit is named
                        {"id", "seconds", "components"}, on failure also {"error_kind", "error_message"}
"""

from __future__ import annotations

from typing import Any, BinaryIO

import msgpack

MAX_REPLY_BYTES = 1 << 20
"""A longer reply did not come from our worker loop."""


def pack(message: dict[str, Any]) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what MessagePack cannot carry."""
    packed = msgpack.packb(message, unicode_errors="surrogatepass")
    assert packed is not None  # None only from a Packer with autoreset off
    return packed


def unpacker(stream: BinaryIO | None = None, max_bytes: int = 0) -> msgpack.Unpacker:
    """Iterate over the messages of an unbuffered stream until it closes, or of the bytes that are fed."""
    return msgpack.Unpacker(stream, max_buffer_size=max_bytes, unicode_errors="surrogatepass", strict_map_key=False)
