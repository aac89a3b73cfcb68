"""What happens to the connections of one socket, as ZeroMQ's monitor tells it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import zmq

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_READABLE = int(zmq.POLLIN)


class SocketMonitor:
    """Events in their order, told by `pump` to whoever has subscribed. Any thread may call it, under `guard`.

    A socket has one monitor at most, hence one object for all who want to know.
    """

    def __init__(self, sock: zmq.Socket):
        self.guard = threading.RLock()
        """Held while subscribers are called."""
        self._sock = sock
        self._subscribers: list[Callable[[int, int], None]] = []
        address = f"inproc://events-{id(self):x}"
        sock.monitor(address, _EVENTS)
        # A plain socket, also where `sock` belongs to asyncio: these reads never wait.
        self._events: zmq.Socket[bytes] = zmq.Context(sock.context).socket(zmq.PAIR)
        # libzmq's own thread would wait for room in this queue, so its room is unlimited.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)

    def subscribe(self, told: Callable[[int, int], None]) -> None:
        """`told(event, value)` for each event from now on."""
        self._subscribers.append(told)

    def pump(self) -> None:
        with self.guard:
            # Asked for each message of the socket, and three times cheaper than a read that finds nothing.
            while not self._events.closed and int(self._events.get(zmq.EVENTS)) & _READABLE:
                packed, _endpoint = self._events.recv_multipart(zmq.NOBLOCK)
                event, value = struct.unpack("=HI", packed)
                for told in self._subscribers:
                    told(event, value)

    def close(self) -> None:
        """By the thread that owns the socket, before it closes that."""
        with self.guard:
            if not self._sock.closed:
                self._sock.monitor(None, 0)  # type: ignore[arg-type]  # None ends it; pyzmq's types do not say so
            self._events.close(linger=0)
