"""CURVE key pairs as files: the learner's own, and those of the rollout servers that may connect.

    DIR/learner.secret          the learner's machine only (mode 0600)
    DIR/learner.public          every machine
    DIR/server.secret           rollout servers' machines only (mode 0600)
    DIR/servers/<name>.public   the learner's machine: the servers that may connect

The plug-in `keys` makes them (`asyncrl keys DIR`). A file holds one key: 40 characters of Z85 (https://rfc.zeromq.org/spec/32).
"""

from __future__ import annotations

import itertools
import logging
import shlex
import struct
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

LEARNER_SECRET, LEARNER_PUBLIC, SERVER_SECRET = "learner.secret", "learner.public", "server.secret"
SERVERS = "servers"


class KeyFileError(ValueError):
    """A key that cannot be read; the message names the file and the fix."""


@dataclass(frozen=True)
class LearnerKeys:
    """The learner's own pair, and the folder of the servers' public keys."""

    secret: bytes = field(repr=False)
    servers: Path

    def authorised(self) -> dict[bytes, str]:
        """Public key -> name. Read anew each time: keys may come and go during a run; what holds no key is skipped."""
        found: dict[bytes, str] = {}
        for path in sorted(self.servers.glob("*.public")):
            with suppress(KeyFileError):
                found[_read(path)] = path.stem
        return found

    @property
    def where(self) -> str:
        """Place of the keys of known peers, for a log line."""
        return str(self.servers)


@dataclass(frozen=True)
class ServerKeys:
    """A rollout server's own pair, and the public key of the only learner that it accepts."""

    secret: bytes = field(repr=False)
    public: bytes
    peer_public: bytes
    folder: Path


def read_learner_keys(folder: Path) -> LearnerKeys:
    """Read the learner's keys. Raises KeyFileError for a missing, public or damaged file, or no server key."""
    keys = LearnerKeys(_read_secret(folder / LEARNER_SECRET), folder / SERVERS)
    if not keys.authorised():
        raise KeyFileError(
            f"{keys.servers} holds no public key, so no rollout server could connect. Copy each server's "
            "*.public there, or make keys with: asyncrl keys DIR"
        )
    return keys


def read_server_keys(folder: Path) -> ServerKeys:
    """Read a server's keys for the learner. Raises KeyFileError if a file is missing, public or damaged."""
    secret = _read_secret(folder / SERVER_SECRET)
    return ServerKeys(secret, zmq.curve_public(secret), _read(folder / LEARNER_PUBLIC), folder)


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    if path.stat().st_mode & 0o007:
        raise KeyFileError(
            f"every user of this machine can read the secret key {path}. Run: chmod 600 {shlex.quote(str(path))}"
        )
    return key


def _read(path: Path) -> bytes:
    """Read a key in Z85. The text of the file never appears in a message."""
    try:
        key = path.read_bytes().strip()
        if len(z85.decode(key)) == 32:
            return key
    except OSError as problem:
        raise KeyFileError(
            f"cannot read the key {path}: {problem.strerror}. Make keys with: asyncrl keys DIR, copy what it "
            "names to each machine, and set network.keys_dir"
        ) from problem
    except (KeyError, ValueError, struct.error):
        pass  # not Z85
    raise KeyFileError(f"{path} does not hold a key (40 characters of Z85). Copy it again")


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


class EndpointKeys(Protocol):
    """An endpoint's own secret key, and the public keys (Z85) that may connect to it."""

    @property
    def secret(self) -> bytes: ...

    @property
    def where(self) -> str:
        """Place of the keys of known peers, for a log line."""
        ...

    def authorised(self) -> Collection[bytes]:
        """Public keys that may connect now."""
        ...


class CurveAuthenticator:
    """Admits the public keys that its `keys` know at each handshake. One per context, made before its sockets."""

    def __init__(self, context: zmq.Context, keys: EndpointKeys):
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
