"""Messages between a process and its workers, MessagePack maps one behind the other, and the worker's end of them.

once         to the worker   {"id", "section", "loads", "memory_limit_mib", ...}: section of the configuration, words
                             for what the worker loads, and what that is
             to its parent   {"id", "ready": True, ...} or {"id", "ready": False, "message", "traceback"}
per request  to the worker   {"id", ...}
             to its parent   {"begun": id, "part"}: it runs, or a named part of it does
                             {"id", ...}: the reply
"""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgpack

from asyncrl.errors import UserError
from asyncrl.user_functions import one_line, shorten
from asyncrl.workers import reaper
from protocol.values import as_extension, of_extension

LONGEST_MESSAGE = 256 << 20
"""Bytes. A longer reply did not come from our worker loop: observations carry images."""


def pack(message: dict[str, Any]) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what cannot travel (`protocol.values`)."""
    packed = msgpack.packb(message, default=as_extension, unicode_errors="surrogatepass")
    assert packed is not None  # None only from a Packer with autoreset off
    return packed


def unpacker(stream: BinaryIO | None = None) -> msgpack.Unpacker:
    """Iterate over the messages of an unbuffered stream until it closes, or of the bytes that are fed."""
    most = LONGEST_MESSAGE if stream is None else 0
    return msgpack.Unpacker(
        stream, max_buffer_size=most, unicode_errors="surrogatepass", strict_map_key=False, ext_hook=of_extension
    )


class Channel:
    """The worker's end: iterate over requests until the parent closes its end, and `send` replies from any thread."""

    def __init__(self) -> None:
        """Take the pipes away from stdin and stdout, so that prints of user code go to the log (stderr)."""
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
        self._requests: Iterator[dict[str, Any]] = unpacker(os.fdopen(incoming, "rb", buffering=0))
        self._outgoing = os.fdopen(outgoing, "wb")
        self._sending = threading.Lock()
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._requests

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # user code forked, and this is the copy; the original answers
            os._exit(0)
        with self._sending:
            self._outgoing.write(pack(message))
            self._outgoing.flush()


Serve = Callable[[Channel], None]
"""Answers the requests of a channel until it ends."""
Load = Callable[[dict[str, Any]], tuple[dict[str, Any], Serve]]
"""Takes the first message; returns facts for the parent, and what serves from then on. Raises anything."""


def run_worker(load: Load) -> None:
    """Be a worker, below a reaper: load what the first message names, serve, and end."""
    reaper.fork_guarded()
    channel, code = Channel(), 0
    try:
        setup = next(iter(channel), None)
        serve = _loaded(setup, channel, load) if setup else None
        if serve is not None:
            serve(channel)
    except BaseException:  # ends the worker, which its parent reports; the log has the whole traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads and exit handlers of user code must not hold the worker


def _loaded(setup: dict[str, Any], channel: Channel, load: Load) -> Serve | None:
    """The loop that serves; None where loading has failed, which the parent is told."""
    if setup["memory_limit_mib"]:
        reaper.limit_memory(setup["memory_limit_mib"])
    try:
        told, serve = load(setup)
    except Exception as error:
        is_clear = isinstance(error, UserError)
        message = str(error) if is_clear else f"{setup['loads']} cannot be loaded: {one_line(error)}"
        is_starved = isinstance(error.__cause__ or error, MemoryError) or "failed to map segment" in message
        if is_starved and setup["memory_limit_mib"]:
            limit = f"{setup['section']}.memory_limit_mib"
            message += f". Workers may use {reaper.memory_limit_mib()} MiB: raise {limit}"
        cause = "".join(traceback.format_exception(error.__cause__ or error))[-4000:]
        channel.send({"id": setup["id"], "ready": False, "message": shorten(message, 4000), "traceback": cause})
        return None
    channel.send({"id": setup["id"], "ready": True, **told})
    return serve


def over_limit(section: str, error: MemoryError, file: str) -> str:
    """Message for user code that wanted more memory than its worker may use. `file` is the user's."""
    limit = f"{reaper.memory_limit_mib()} MiB ({section}.memory_limit_mib)"
    return f"over the limit of {limit}: {one_line(error, file)}"
