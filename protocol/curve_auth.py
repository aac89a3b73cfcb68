"""CURVE authentication: the learner admits known public keys; a server learns why its handshake fails.

The learner's sockets are CURVE servers. libzmq asks over ZAP (https://rfc.zeromq.org/spec/27) for each new
connection whether its public key may enter; one thread answers here, and counts rejections.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

import zmq

from protocol.curve import LearnerKeys, ServerKeys

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asyncrl"
POLL_S = 0.1
"""Longest time between two looks of the authenticator at whether it is closed."""
LOG_EVERY_S = 60.0
"""Seconds between two log lines of one kind: a scanner that tries all day is counted all day, and logged seldom."""
BAD_HANDSHAKES = 3
"""Handshakes in a row that end without a reason before it counts as permanent (a learner may restart during one)."""
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class HandshakeRejected(ConnectionError):
    """One side refuses this connection for good; the message names the keys to change."""


def become_curve_server(sock: zmq.Socket, keys: LearnerKeys) -> None:
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator every connection is rejected


def become_curve_client(sock: zmq.Socket, keys: ServerKeys) -> None:
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.learner_public)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class HandshakeEvents:
    """Outcomes of one socket's handshakes, as ZeroMQ's monitor reports them."""

    def __init__(self, sock: zmq.Socket):
        self._sock = sock
        address = f"inproc://handshakes-{id(self):x}"
        sock.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILURES))
        # A plain socket, also where `sock` belongs to asyncio: these reads never wait.
        self._events: zmq.Socket[bytes] = zmq.Context(sock.context).socket(zmq.PAIR)
        # libzmq's own thread would wait for room in this queue, so its room is unlimited.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)

    def take(self) -> Iterator[tuple[int, int]]:
        """Events since the last call, in order: ZeroMQ's number of the event, and its value."""
        while not self._events.closed and self._events.poll(0):
            packed, _endpoint = self._events.recv_multipart()
            yield struct.unpack("=HI", packed)

    def close(self) -> None:
        """Stop monitoring. Call it in the thread that owns the socket, before closing that."""
        if not self._sock.closed:
            self._sock.monitor(None, 0)  # type: ignore[arg-type]  # None ends it; pyzmq's types do not say so
        self._events.close(linger=0)


class CurveAuthenticator(threading.Thread):
    """Admits the public keys in the learner's `servers` folder. One per context, made before its sockets."""

    def __init__(self, context: zmq.Context, keys: LearnerKeys):
        super().__init__(name="curve-authenticator", daemon=True)
        self._keys = keys
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        self._watched: list[HandshakeEvents] = []
        self._rejected: Counter[str] = Counter()
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._logged_at: dict[str, float] = {}

    def watch(self, sock: zmq.Socket) -> None:
        """Count this socket's failed handshakes, too."""
        self._watched.append(HandshakeEvents(sock))

    def take_rejections(self) -> Counter[str]:
        """Rejected connections by kind since the last call: `rejected_key`, `failed_handshake`."""
        for events in self._watched:
            for event, _value in events.take():
                # A rejected key (EVENT_HANDSHAKE_FAILED_AUTH) is counted in `_answer`.
                if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    self._reject("failed_handshake", "a peer has no keys, or another learner's public key")
        with self._guard:
            taken, self._rejected = self._rejected, Counter()
        return taken

    def close(self) -> None:
        """Stop the thread. Call it in the thread that owns the watched sockets, before closing those."""
        self._closing.set()
        if self.is_alive():
            self.join()
        self._zap.close(linger=0)
        for events in self._watched:
            events.close()

    def run(self) -> None:
        while not self._closing.is_set():
            if self._zap.poll(round(1000 * POLL_S)):
                self._zap.send_multipart(self._answer(self._zap.recv_multipart()))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """ZAP 1.0: version, request id, domain, address, identity, mechanism, credentials -> a status."""
        version, request_id = request[0], request[1] if len(request) > 1 else b""
        status, text, name = b"400", b"not authorised", ""
        if version == b"1.0" and len(request) == 7 and request[5] == b"CURVE":
            name = self._keys.authorised().get(request[6], "")
            if name:
                status, text = b"200", b"OK"
            else:
                address = request[3].decode("ascii", "replace")
                self._reject("rejected_key", f"the key of a peer at {address} is not in {self._keys.servers}")
        return [b"1.0", request_id, status, text, name.encode(), b""]

    def _reject(self, kind: str, reason: str) -> None:
        with self._guard:
            self._rejected[kind] += 1
        now = time.monotonic()
        if now - self._logged_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[kind] = now
            logger.warning("a connection was rejected: %s", reason)


class HandshakeWatch:
    """A server's handshakes with its learner: can they ever succeed?"""

    def __init__(self, sock: zmq.Socket, endpoint: str, keys: ServerKeys | None):
        self._events = HandshakeEvents(sock)
        self._endpoint = endpoint
        self._keys = keys
        self._failures_in_a_row = 0
        self._reason = ""
        """First reason that a failure gave since the last success."""

    def check(self) -> None:
        """Raise HandshakeRejected once it is clear that no handshake will succeed."""
        for event, value in self._events.take():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failures_in_a_row, self._reason = 0, ""
            else:
                self._failures_in_a_row += 1
                self._reason = self._reason or self._reason_of(event, value)
        if self._reason:
            raise HandshakeRejected(self._reason)
        if self._failures_in_a_row >= BAD_HANDSHAKES:
            raise HandshakeRejected(self._likely_reasons())

    def close(self) -> None:
        self._events.close()

    def _reason_of(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"the learner at {self._endpoint} does not know this server's key. Copy the server's *.public "
                "file into the servers folder of the learner's network.keys_dir (see: asyncrl keys)"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            theirs, mine = ("none", "keys") if self._keys else ("keys", "none")
            return (
                f"the learner at {self._endpoint} uses {theirs} and this server {mine}. Set network.keys_dir on "
                "both sides, or on neither"
            )
        return ""

    def _likely_reasons(self) -> str:
        """The side that closes first takes its reason with it: on a busy machine a mismatch can look like nothing."""
        times = f"{self._endpoint} ended {self._failures_in_a_row} handshakes in a row"
        if self._keys is None:
            return (
                f"{times}: something else than a learner listens there (check network.host and the ports), or the "
                "learner there uses keys (set network.keys_dir here, too)"
            )
        return (
            f"{times}: {self._keys.folder / 'learner.public'} is not the key of the learner there (copy it from the "
            "learner's network.keys_dir again), or that learner uses no keys, or something else listens"
        )
