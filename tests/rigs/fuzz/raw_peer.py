"""ZMTP 3.0 (https://rfc.zeromq.org/spec/23) by hand, for what ZeroMQ itself never sends: messages without an end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(48)
MORE, LONG = 1, 2
SLICE = 1 << 16
TIMEOUT_S = 20.0
ENDED_S = 5.0
"""Longest until the other side must have found out."""


def ready(kind: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes([len(body)]) + body


def frame(data: bytes | memoryview, *, more: bool) -> bytes:
    return frame_head(len(data), more=more) + bytes(data)


def frame_head(nbytes: int, *, more: bool) -> bytes:
    if nbytes <= 255:
        return bytes([MORE * more, nbytes])
    return bytes([MORE * more | LONG]) + nbytes.to_bytes(8, "big")


def message(frames: Sequence[bytes | memoryview]) -> bytes:
    last = len(frames) - 1
    return b"".join(frame(data, more=index < last) for index, data in enumerate(frames))


FLOODS = {
    "frames of 256 KiB": (frame(bytes(256 * 1024), more=True), 64 << 20),
    "empty frames": (frame(b"", more=True) * 50_000, 32 << 20),
}
"""Of a message without an end: what is repeated, and most bytes of it. Empty frames take 32 times as much memory."""


def tcp_address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


class RawPeer:
    """One connection after its handshake, without keys."""

    def __init__(self, sock: socket.socket, kind: bytes):
        self.sock = sock
        sock.settimeout(TIMEOUT_S)
        sock.sendall(GREETING + ready(kind))
        self._hear(len(GREETING))
        head = self._hear(2)
        self._hear(head[1])

    @classmethod
    def dial(cls, endpoint: str) -> RawPeer:
        """As a rollout server."""
        return cls(socket.create_connection(tcp_address(endpoint), timeout=TIMEOUT_S), b"DEALER")

    def _hear(self, nbytes: int) -> bytes:
        heard = b""
        while len(heard) < nbytes:
            got = self.sock.recv(nbytes - len(heard))
            if not got:
                raise ConnectionError("hung up during the handshake")
            heard += got
        return heard

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send_until_ended(self, data: bytes, most: int) -> int:
        """Repeat `data` up to `most` bytes; returns what went out before the other side hung up, or `most`."""
        sent = 0
        try:
            while sent < most:
                self.sock.sendall(data)
                sent += len(data)
        except (ConnectionError, BrokenPipeError):
            return sent
        return most

    def is_ended(self) -> bool:
        """The other side has closed the connection; what it said before is thrown away."""
        self.sock.setblocking(False)
        try:
            while self.sock.recv(SLICE):
                pass
            return True
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        finally:
            self.sock.settimeout(TIMEOUT_S)

    def is_ended_soon(self) -> bool:
        """Within ENDED_S."""
        deadline = time.monotonic() + ENDED_S
        while not (ended := self.is_ended()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return ended

    def close(self) -> None:
        self.sock.close()


class Withholder:
    """Relays one connection to `endpoint`, and of what the dialling side says only so many bytes.

    With keys a message cannot be made by hand; here a real one is cut. `backwards` withholds what the other side says.
    """

    def __init__(self, endpoint: str, nbytes: int, *, backwards: bool = False):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._onwards = tcp_address(endpoint)
        self._nbytes = nbytes
        self._backwards = backwards
        self._sockets: list[socket.socket] = [self._listener]
        self.hung_up = threading.Event()
        """A side has closed the first connection."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._onwards)
        self._sockets += [near, far]
        for source, target, limited in ((near, far, not self._backwards), (far, near, self._backwards)):
            left = self._nbytes if limited else None
            threading.Thread(target=self._pump, args=(source, target, left), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        try:
            while data := source.recv(SLICE):
                if left is not None:
                    data, left = data[:left], max(0, left - len(data))
                target.sendall(data)
        except OSError:
            pass
        self.hung_up.set()
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
