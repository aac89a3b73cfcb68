"""Messages between pool and a process that scores: MessagePack maps, one behind the other.

once        to process  {"memory_limit_mib", "components": [{"name", "function", "kwargs", "path", ...}]}, or of a
                        plug-in's scorer {"name", "settings"}
            to pool     {"ready": True} or {"ready": False, "message"}
per request to process  {"id", "row", "completions", "scores", "components"}: fields that the samples share and those of
                        each, the score of each so far, names of the wanted components
            to pool     {"begun"} before each component: its name, by which a killed worker's culprit is named
                        {"id", "seconds", "scores"}, of a plug-in's scorer also {"counts"}
"""

from __future__ import annotations

import io
import os
import sys
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


# --- in a process that scores ----------------------------------------------------------------------


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes away from stdin and stdout, so that prints of user code go to the log (stderr)."""
    incoming, outgoing = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # else a killed worker's prints are lost

    def close_in_forks() -> None:
        os.close(incoming)
        os.close(outgoing)

    os.register_at_fork(after_in_child=close_in_forks)
    return os.fdopen(incoming, "rb", buffering=0), os.fdopen(outgoing, "wb")


def send(outgoing: BinaryIO, message: dict[str, Any]) -> None:
    outgoing.write(pack(message))
    outgoing.flush()
