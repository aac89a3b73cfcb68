"""CURVE authentication: the learner admits known public keys; a server learns why its handshake fails.

The learner's sockets are CURVE servers. libzmq asks over ZAP (https://rfc.zeromq.org/spec/27) for each new
connection whether its public key may enter; pyzmq's authenticator thread answers.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol.curve import LEARNER_PUBLIC, LearnerKeys, RelayKeys, ServerKeys

logger = logging.getLogger(__name__)

ZAP_DOMAIN = "asyncrl"
LOG_EVERY_S = 60.0
"""Seconds between two log lines of one kind: a scanner that tries all day is counted all day, and logged seldom."""
BAD_HANDSHAKES = 3
"""Handshakes in a row that end without a reason before it counts as permanent (a learner may restart during one)."""
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)

_NUMBERS = itertools.count()


class HandshakeRejected(ConnectionError):
    """One side refuses this connection for good; the message names the keys to change."""


def become_curve_client(sock: zmq.Socket, keys: ServerKeys) -> None:
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.peer_public)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class HandshakeEvents:
    """Outcomes of one socket's handshakes, as ZeroMQ's monitor reports them."""

    def __init__(self, sock: zmq.Socket):
        self._sock = sock
        # Never the same twice: ZeroMQ gives an address back some time after its socket is closed.
        address = f"inproc://handshakes-{next(_NUMBERS)}"
        sock.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_FAILURES))
        # A plain socket, also where `sock` belongs to asyncio: these reads never wait.
        self._events: zmq.Socket[bytes] = zmq.Context(sock.context).socket(zmq.PAIR)
        # libzmq's own thread would wait for room in this queue, so its room is unlimited.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)

    def take(self) -> Iterator[int]:
        """ZeroMQ's numbers of the events since the last call, in order."""
        while not self._events.closed and self._events.poll(0):
            yield struct.unpack_from("=H", self._events.recv_multipart()[0])[0]

    def close(self) -> None:
        """Stop monitoring. Call it in the thread that owns the socket, before closing that."""
        if not self._sock.closed:
            self._sock.disable_monitor()
        self._events.close(linger=0)


class CurveAuthenticator:
    """Admits the public keys that its `keys` know at each handshake. One per context, made before its sockets."""

    def __init__(self, context: zmq.Context, keys: LearnerKeys | RelayKeys):
        self._keys = keys
        self._guarded: list[HandshakeEvents] = []
        self._rejected: deque[str] = deque()
        self._logged_at: dict[str, float] = {}
        self._thread = ThreadAuthenticator(context)
        self._thread.configure_curve_callback(ZAP_DOMAIN, credentials_provider=self)
        self._thread.start()

    def guard(self, sock: zmq.Socket) -> None:
        """Make a socket that is not bound yet a CURVE server, and count its failed handshakes."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        sock.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator every connection is rejected
        self._guarded.append(HandshakeEvents(sock))

    def take_rejections(self) -> Counter[str]:
        """Rejected connections by kind since the last call: `rejected_key`, `failed_handshake`."""
        for events in self._guarded:
            for event in events.take():
                # A rejected key (EVENT_HANDSHAKE_FAILED_AUTH) is counted in `callback`.
                if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    self._reject("failed_handshake", "a peer has no keys, or another learner's public key")
        return Counter(self._rejected.popleft() for _ in range(len(self._rejected)))

    def authorised(self) -> Collection[bytes]:
        """Public keys (Z85) that may connect now."""
        return self._keys.authorised()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a key (in Z85) is authorised; called by pyzmq's thread under this name."""
        is_known = key in self._keys.authorised()
        if not is_known:
            self._reject("rejected_key", f"the key of a peer is not in {self._keys.where}")
        return is_known

    def close(self) -> None:
        """Stop the thread. Call it in the thread that owns the guarded sockets, before closing those."""
        self._thread.stop()
        for events in self._guarded:
            events.close()

    def _reject(self, kind: str, reason: str) -> None:
        self._rejected.append(kind)
        now = time.monotonic()
        if now - self._logged_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[kind] = now
            logger.warning("a connection was rejected: %s", reason)


class HandshakeWatch:
    """Detects handshakes of a server with its learner that can never succeed."""

    def __init__(self, sock: zmq.Socket, endpoint: str, keys: ServerKeys | None):
        self._events = HandshakeEvents(sock)
        self._endpoint = endpoint
        self._keys = keys
        self._failures: list[int] = []
        """Failures since the last success."""
        self.connections = 0
        """Handshakes that have succeeded; more than one: the connection was lost meanwhile."""

    def look(self) -> None:
        """Take in what has happened to the connection."""
        for event in self._events.take():
            has_succeeded = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.connections += has_succeeded
            if event != zmq.EVENT_DISCONNECTED:
                self._failures = [] if has_succeeded else [*self._failures, event]

    def check(self) -> None:
        """Raise HandshakeRejected once it is clear that no handshake will succeed."""
        self.look()
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in self._failures:
            raise HandshakeRejected(
                f"the learner at {self._endpoint} does not know this server's key. Copy the server's *.public "
                "file into the servers folder of the learner's network.keys_dir (see: asyncrl keys)"
            )
        # libzmq does not try again after an error of the protocol.
        if zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL in self._failures or len(self._failures) >= BAD_HANDSHAKES:
            reasons = "the learner there uses keys (set network.keys_dir here, too)"
            if self._keys is not None:
                reasons = (
                    f"{self._keys.folder / LEARNER_PUBLIC} is not the key of the learner there (copy it from the "
                    "learner's network.keys_dir again), or that learner uses no keys (set it there, too)"
                )
            raise HandshakeRejected(
                f"no handshake with {self._endpoint} can succeed: {reasons}, or something else than a learner "
                "listens there (check network.host and the ports)"
            )

    def close(self) -> None:
        self._events.close()
