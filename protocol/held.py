"""What ZeroMQ holds of each connection, and the end of a connection that makes it hold too much.

ZeroMQ limits the bytes of a frame (MAXMSGSIZE) and the number of complete messages that wait (RCVHWM). The frames of a
message that never ends are in neither account, and invisible to us. The kernel counts them: the bytes that it has
passed to ZeroMQ, less the messages that we have taken, lie in ZeroMQ's memory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import zmq

from protocol.codec import Limits
from protocol.monitor import SocketMonitor
from protocol.socket_options import Queues

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two looks. What a peer can send meanwhile comes on top of the bound."""
LOG_EVERY_S = 60.0
_BYTES_RECEIVED = 128
"""Offset of `tcpi_bytes_received` (uint64) in Linux' tcp_info, which has it since 4.1."""
_SO_COOKIE = 57
"""Linux: a number that no other socket has had since boot; descriptors are used again."""
_FRAME_BYTES, _SHORT_FRAME_BYTES, _SHORT = 9, 2, 255
"""ZMTP: flags and length of a frame, and of one of at most 255 bytes."""
_CURVE_BYTES = 33
"""CURVE: name, nonce, authentication code and flags around each frame."""
_SLACK = 1 << 14
"""A handshake, and the 8 KiB that ZeroMQ may have read and not passed on."""


@dataclass(frozen=True)
class Allowance:
    """Bytes on the wire that a well-behaved peer may have with ZeroMQ."""

    unfinished: int
    """While no complete message waits: one message of the limit, with its framing."""
    queued: int
    """In any case: a full queue, the message that finds no room in it, and an unfinished one."""

    @classmethod
    def of(cls, limits: Limits, queues: Queues, *, curve: bool) -> Allowance:
        framing = _FRAME_BYTES + (_CURVE_BYTES if curve else 0)
        message = limits.max_message_bytes + limits.max_frames * framing
        return cls(message + _SLACK, (queues.receive + 2) * message + _SLACK)


def wire_bytes(frames: Sequence[zmq.Frame], *, curve: bool) -> int:
    """What these frames were on the wire; a peer that frames them less densely is counted as holding more."""
    around, total = _CURVE_BYTES if curve else 0, 0
    for frame in frames:
        size = len(frame) + around
        total += size + (_SHORT_FRAME_BYTES if size <= _SHORT else _FRAME_BYTES)
    return total


@dataclass(frozen=True)
class _Mark:
    """A connection at an earlier look. Once everything complete of then has been taken, the rest is unfinished."""

    passed: int
    look: int
    messages: int


@dataclass
class _Connection:
    taken: int = 0
    """Bytes on the wire of the messages that the application has taken."""
    last_taken: int = 0
    """Number, among all messages of the socket, of the last one from here."""
    cookie: bytes = b""
    mark: _Mark | None = None
    ended: bool = False


class ReceiveMemoryGuard(threading.Thread):
    """Looks at the connections of one socket, and ends those beyond their `Allowance`.

    A thread of its own, since whoever reads the socket may be at work for a while. `port` is the local one of a `bound`
    socket, and the remote one of a connected socket. Where the kernel does not count (not Linux) nothing is bounded,
    and a warning says so.
    """

    def __init__(self, monitor: SocketMonitor, allowance: Allowance, *, curve: bool, port: int, bound: bool):
        super().__init__(name="held-watch", daemon=True)
        self.looks = 0
        """Made so far."""
        self._monitor = monitor
        self._allowance = allowance
        self._curve = curve
        self._port = port
        self._bound = bound
        self._connections: dict[int, _Connection] = {}
        """By descriptor."""
        self._emptied_at_look = -1
        self._messages = 0
        self._sources = 0
        """At most so many connections, closed ones included, may have complete messages waiting."""
        self._ended = 0
        self._logged_at = -LOG_EVERY_S
        self._closing = threading.Event()
        monitor.subscribe(self._told)
        if kernel_counts():
            self.start()
        else:
            logger.warning("this system does not count the bytes of a connection: unfinished messages are not bounded")

    # --- told by whoever reads the socket -----------------------------------------------------------

    def took(self, frames: Sequence[zmq.Frame]) -> None:
        """These frames of one peer, of a whole message or of a part of one, have left ZeroMQ."""
        with self._monitor.guard:
            self._monitor.pump()  # its connection first: descriptors are used again
            self._messages += 1
            connection = self._connections.get(_source(frames[0]))
            if connection is not None:
                connection.taken += wire_bytes(frames, curve=self._curve)
                connection.last_taken = self._messages

    def found_empty(self, look: int) -> None:
        """The socket had no complete message at a time after `look` (`looks`, read before trying)."""
        with self._monitor.guard:
            self._emptied_at_look = look
            self._sources = len(self._connections)

    def end(self, frame: zmq.Frame, reason: str) -> None:
        """End the connection that this frame came from."""
        with self._monitor.guard:
            self._monitor.pump()
            descriptor = _source(frame)
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._passed(descriptor, connection)
                self._end(descriptor, connection, reason)

    def take_ended(self) -> int:
        """Connections ended since the last call."""
        with self._monitor.guard:
            taken, self._ended = self._ended, 0
        return taken

    def close(self) -> None:
        self._closing.set()
        if self.is_alive():
            self.join()

    # --- the thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        with self._monitor.guard:
            self._monitor.pump()
            self.looks += 1
            for descriptor, connection in list(self._connections.items()):
                passed = self._passed(descriptor, connection)
                if passed is None:
                    del self._connections[descriptor]  # closed; another one of this number will be announced
                elif not connection.ended:
                    self._judge(descriptor, connection, passed)

    def _judge(self, descriptor: int, connection: _Connection, passed: int) -> None:
        held, mark = passed - connection.taken, connection.mark
        if held > self._allowance.queued:
            self._end(descriptor, connection, f"{held:,} bytes wait unread")
        elif mark is None or self._nothing_waits_since(mark, connection):
            if mark is not None and mark.passed - connection.taken > self._allowance.unfinished:
                self._end(descriptor, connection, f"{held:,} bytes of a message that does not end")
            connection.mark = _Mark(passed, self.looks, self._messages)

    def _nothing_waits_since(self, mark: _Mark, connection: _Connection) -> bool:
        """The socket was found empty since, or all others had their turn and this connection had nothing.

        (ZeroMQ takes messages from its connections in turns.)
        """
        passed_over = self._messages - max(mark.messages, connection.last_taken)
        return self._emptied_at_look >= mark.look or passed_over > self._sources + 1

    def _told(self, event: int, value: int) -> None:
        if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            self._connections[value] = _Connection(last_taken=self._messages)
            self._sources += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.pop(value, None)

    def _passed(self, descriptor: int, connection: _Connection) -> int | None:
        """Bytes that the kernel has passed to ZeroMQ, or None if the descriptor is another's by now."""
        try:
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
        except OSError:
            return None
        try:
            passed = _bytes_received(borrowed) - _bytes_unread(borrowed)  # in this order never too much
            cookie = borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
            if not connection.cookie and self._is_ours(borrowed):
                connection.cookie = cookie
            return passed if cookie == connection.cookie else None
        except OSError:
            return None
        finally:
            borrowed.detach()  # it is ZeroMQ's to close

    def _is_ours(self, sock: socket.socket) -> bool:
        address = sock.getsockname() if self._bound else sock.getpeername()
        return address[1] == self._port

    def _end(self, descriptor: int, connection: _Connection, reason: str) -> None:
        """ZeroMQ then closes the connection and drops what is there of an unfinished message."""
        try:
            # A duplicate cannot become another socket between these calls.
            with socket.socket(fileno=os.dup(descriptor)) as same:
                if same.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8) != connection.cookie:
                    return
                host, port, *_ = same.getpeername()
                # ZeroMQ's close is then a reset: a peer that waits for room is told, the kernel's buffers are freed.
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                same.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has gone by itself
        connection.ended = True
        self._ended += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("the connection to %s port %d is ended: %s", host, port, reason)


def _source(frame: zmq.Frame) -> int:
    """Descriptor of the connection that it came over, or -1 from a peer of ZeroMQ before 4.0.

    Such a peer gets no credit for what is taken: it may send one allowance in all. Ours are newer.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


@cache
def kernel_counts() -> bool:
    """Does this system say how much it has received on a connection, and which connection that is?"""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            _bytes_received(probe)
            return any(probe.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))
        except (OSError, AttributeError, struct.error):
            return False


def _bytes_received(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    return struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]


def _bytes_unread(sock: socket.socket) -> int:
    return struct.unpack("=i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))[0]
