"""Who gets through the handshake: the learner's gatekeeper, and why a server was turned away.

The learner's sockets are CURVE servers. libzmq asks over ZAP (https://rfc.zeromq.org/spec/27) for each new
connection whether its public key may enter; here one thread answers, and counts who was rejected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

import zmq

from protocol.curve import LearnerKeys, ServerKeys
from protocol.monitor import SocketMonitor

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asyncrl"
HANDSHAKE_S = 10.0
"""Longest that a connection may take to authenticate."""
LOG_EVERY_S = 60.0
"""A scanner that tries all day is counted all day and logged once a minute."""
BAD_HANDSHAKES = 3
"""So many handshakes in a row that end without a reason are no coincidence (a learner may restart during one)."""
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class HandshakeRejected(ConnectionError):
    """The learner or we ourselves refuse this connection for good; the message names the keys to change."""


class CurveAuthenticator(threading.Thread):
    """Lets in whose public key lies in the learner's `servers` folder. One per context, made before its sockets."""

    def __init__(self, context: zmq.Context, keys: LearnerKeys):
        super().__init__(name="gate", daemon=True)
        self._keys = keys
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        address = f"inproc://gate-{id(self):x}"
        self._end, self._ended = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._ended.bind(address)
        self._end.connect(address)
        self._monitors: list[SocketMonitor] = []
        self._rejected: Counter[str] = Counter()
        self._guard = threading.Lock()
        self._logged_at: dict[str, float] = {}

    def watch(self, monitor: SocketMonitor) -> None:
        """Count this socket's failed handshakes, too."""
        self._monitors.append(monitor)
        monitor.subscribe(self._told)

    def take_rejections(self) -> Counter[str]:
        """Rejected connections by kind since the last call: `rejected_key`, `failed_handshake`."""
        for monitor in self._monitors:
            monitor.pump()
        with self._guard:
            taken, self._rejected = self._rejected, Counter()
        return taken

    def close(self) -> None:
        """Before the sockets are closed, by the thread that owns them."""
        if self.is_alive():
            self._end.send(b"")
            self.join()
        for sock in (self._zap, self._end, self._ended):
            sock.close(linger=0)

    def run(self) -> None:
        poller = zmq.Poller()
        for sock in (self._zap, self._ended):
            poller.register(sock, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._ended in ready:
                return
            if self._zap in ready:
                self._zap.send_multipart(self._answer(self._zap.recv_multipart()))

    def _told(self, event: int, _value: int) -> None:
        # A rejected key is counted where it is rejected.
        if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._reject("failed_handshake", "a peer has no keys, or another learner's public key")

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """ZAP 1.0: version, request id, domain, address, identity, mechanism, credentials -> a status."""
        version, request_id = request[0], request[1] if len(request) > 1 else b""
        status, text, name = b"400", b"not authorised", ""
        if version == b"1.0" and len(request) == 7 and request[5] == b"CURVE":
            name = self._name_of(request[6])
            if name:
                status, text = b"200", b"OK"
            else:
                address = request[3].decode("ascii", "replace")
                self._reject("rejected_key", f"the key of a peer at {address} is not in {self._keys.servers}")
        return [b"1.0", request_id, status, text, name.encode(), b""]

    def _name_of(self, key: bytes) -> str:
        return self._keys.authorised().get(key, "")

    def _reject(self, kind: str, reason: str) -> None:
        with self._guard:
            self._rejected[kind] += 1
        now = time.monotonic()
        if now - self._logged_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[kind] = now
            logger.warning("a connection was rejected: %s", reason)


class HandshakeWatch:
    """A server's view of its own handshakes: hopeless or not."""

    def __init__(self, monitor: SocketMonitor, endpoint: str, keys: ServerKeys | None):
        self._monitor = monitor
        self._endpoint = endpoint
        self._keys = keys
        self._failures_in_a_row = 0
        self._rejection: HandshakeRejected | None = None
        monitor.subscribe(self._told)

    def check(self) -> None:
        """Raises HandshakeRejected once it is clear that no handshake will succeed."""
        self._monitor.pump()
        if self._rejection is not None:
            raise self._rejection
        if self._failures_in_a_row >= BAD_HANDSHAKES:
            raise HandshakeRejected(self._no_reason_given())

    def _told(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures_in_a_row, self._rejection = 0, None
        elif event in _FAILURES:
            self._failures_in_a_row += 1
            reason = self._reason(event, value)
            if reason is not None and self._rejection is None:
                self._rejection = HandshakeRejected(reason)

    def _reason(self, event: int, value: int) -> str | None:
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
        return None

    def _no_reason_given(self) -> str:
        """Who closes first, takes what he said with him: on a busy machine a mismatch can look like nothing."""
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
