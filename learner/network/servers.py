"""Who is connected: hello and welcome, the pulse of both sides, and how a server is lost.

Used by the exchange thread alone; other threads may read `servers` and `errors`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.config.schema import RunConfig
from learner.network.ports import LearnerPorts
from learner.tickets.ledger import TicketLedger
from protocol.endpoints import host_id
from protocol.errors import ErrorCode
from protocol.handshake import check_hello, check_mode
from protocol.lease import process_birth
from protocol.messages import (
    DeviceSource,
    Error,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    ServerHeartbeat,
    WeightManifest,
    WeightsLoaded,
    Welcome,
    Wire,
)
from protocol.peers import Muted
from protocol.sockets import Delivery

logger = logging.getLogger(__name__)

SLOWEST_TURN_S = 2.0
"""Between two looks at the servers; what is beyond it counts as our silence, not as theirs."""
MAX_ERROR_KINDS = 64
MAX_ERROR_KIND_LENGTH = 100


@dataclass(frozen=True)
class ModelFacts:
    """What the learner's model must have in common with the servers'."""

    model_fingerprint: str
    processor_fingerprint: str
    vocabulary: int
    base_fingerprint: str = ""
    """Of the base weights' content where only adapters travel."""


@dataclass
class ServerState:
    """What the learner knows of one welcomed server."""

    hello: Hello
    identity: bytes
    heard_at: float = field(default_factory=time.monotonic)
    heartbeat: ServerHeartbeat | None = None
    loaded: WeightsLoaded | None = None
    idle_since: float | None = None
    """Since when it has reported no work while holding tickets."""
    aligned: bool = False
    """Its engine computes what the learner computes, or nobody asks: it may have work."""
    refused: bool = False
    """It was told so, and is only expected to say goodbye."""


class Servers:
    def __init__(self, config: RunConfig, run_id: str, ports: LearnerPorts, ledger: TicketLedger, facts: ModelFacts):
        self.servers: dict[str, ServerState] = {}
        self.errors: Counter[str] = Counter()
        """Unusable messages, refused groups and failed tickets by kind."""
        self.manifest: WeightManifest | None = None
        """Of the newest published version."""
        self.device: Callable[[], DeviceSource | None] = lambda: None
        """From which versions can be had over device channels now."""
        self._network = config.network
        self._mode = config.trainer.mode
        self._run_id = run_id
        self._incarnation = uuid.uuid4().hex[:12]
        self._ports = ports
        self._ledger = ledger
        self._facts = facts
        self._beat_at = 0.0
        self.looked_at = float("inf")

    @property
    def aligned(self) -> dict[str, ServerState]:
        """Servers that may have work. Other threads may ask."""
        return {server_id: server for server_id, server in self.servers.copy().items() if server.aligned}

    def at(self, identity: bytes) -> str | None:
        """The server behind a connection."""
        return next((i for i, s in self.servers.items() if s.identity == identity), None)

    def greet(self, identity: bytes, hello: Hello, version: int) -> None:
        """Welcome, refuse, or ignore: a hello may be repeated before the welcome arrives."""
        name = self.at(identity)
        if name not in (None, hello.server_id):
            reason = f"this connection is server {name!r} already"
            self._ports.control.send(identity, Error(code=ErrorCode.DUPLICATE_SERVER, reason=reason))
            self._ports.control.charge(identity)
            return
        self._replace_dead(hello)
        refusal = check_mode(hello, self._mode, self._tenant(hello)) or check_hello(
            hello,
            model_fingerprint=self._facts.model_fingerprint,
            processor_fingerprint=self._facts.processor_fingerprint,
            base_fingerprint=self._facts.base_fingerprint,
            live_server_ids={i: s.hello.session for i, s in self.servers.items()},
        )
        if refusal:
            logger.warning("%s refused: %s", hello.server_id, refusal.reason)
            self._ports.control.send(identity, refusal)
            return
        known = self.servers.get(hello.server_id)
        if known is not None and known.identity == identity:
            return
        brought = self._ledger.out.reconcile(hello.server_id, hello.held_ticket_ids)
        back = f" with {brought} of its tickets" if brought else ""
        logger.info("%s is welcome%s (%s engine, pid %d)", hello.server_id, back, hello.engine, hello.pid)
        self.servers[hello.server_id] = ServerState(hello, identity)
        if self.send(hello.server_id, self._welcome(version)) and self.manifest is not None:
            self.send(hello.server_id, self.manifest)

    def _tenant(self, hello: Hello) -> Hello | None:
        """Another server than this one."""
        return next((s.hello for s in self.servers.values() if s.hello.server_id != hello.server_id), None)

    def _replace_dead(self, hello: Hello) -> None:
        """Who shares a device shares the machine: a process that has gone need not be silent for network.timeout_s."""
        tenant = self._tenant(hello) if self._mode == "sync" else None
        if tenant is not None and tenant.host_id == host_id() and process_birth(tenant.pid) is None:
            self.lose(tenant.server_id, f"its process ({tenant.pid}) has gone")

    def _welcome(self, version: int) -> Welcome:
        return Welcome(
            run_id=self._run_id,
            incarnation=self._incarnation,
            host_id=host_id(),
            version=version,
            weights_port=self._network.weights_port,
            heartbeat_s=self._network.heartbeat_s,
            timeout_s=self._network.timeout_s,
            device=self.device(),
        )

    def send(self, server_id: str, message: Wire) -> bool:
        """False if the server could not be reached; it is then lost."""
        delivery = self._ports.control.send(self.servers[server_id].identity, message)
        if delivery is not Delivery.SENT:
            self.lose(server_id, f"a message could not be delivered ({delivery})")
        return delivery is Delivery.SENT

    def send_to_all(self, message: Wire) -> None:
        for server_id in list(self.servers):
            self.send(server_id, message)

    def publish(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self.send_to_all(manifest)

    # --- the pulse --------------------------------------------------------------------------------

    def keep_alive(self, version: int) -> None:
        now = time.monotonic()
        self._forgive_own_silence(now)
        if now - self._beat_at >= self._network.heartbeat_s:
            self._beat_at = now
            self.errors.update(self._ports.take_rejections())
            self.send_to_all(LearnerHeartbeat(version=version, step=version))
        for server_id, server in list(self.servers.items()):
            silent_s = now - server.heard_at
            if silent_s > self._network.timeout_s:
                self.lose(server_id, f"silent for {silent_s:.0f} s (network.timeout_s)")

    def _forgive_own_silence(self, now: float) -> None:
        """After a turn that took very long (the process was stopped), what servers said meanwhile is still unread."""
        stalled_s = now - self.looked_at - min(SLOWEST_TURN_S, self._network.timeout_s / 2)
        self.looked_at = now
        if stalled_s <= 0:
            return
        logger.warning("this learner stood still for %.0f s", stalled_s)
        for server in self.servers.values():
            server.heard_at += stalled_s
            if server.idle_since is not None:
                server.idle_since += stalled_s

    def take_pulse(self, server_id: str, beat: ServerHeartbeat) -> None:
        """One that says it has no work, though tickets went to it long ago, sends without reading."""
        server = self.servers[server_id]
        server.heartbeat = beat
        idle = not (beat.groups_queued or beat.groups_running or beat.groups_unacknowledged)
        if not idle or not self._ledger.out.held_by(server_id):
            server.idle_since = None
        elif server.idle_since is None:
            server.idle_since = time.monotonic()
        elif time.monotonic() - server.idle_since > self._network.timeout_s:
            self.lose(server_id, "it holds tickets, and has said for network.timeout_s that it has none")

    # --- trouble and the end ------------------------------------------------------------------------

    def count_error(self, kind: str) -> None:
        """`kind` may be the peer's own word: only so many become keys, and labels of a metric."""
        known = kind in self.errors or len(self.errors) < MAX_ERROR_KINDS
        self.errors[kind[:MAX_ERROR_KIND_LENGTH] if known else "other"] += 1

    def give_back(self, ticket_id: int, server_id: str, reason: str) -> None:
        """A ticket that this server failed at. What another server holds is not its to return."""
        if self._ledger.out.holder(ticket_id) == server_id:
            self._ledger.out.give_back(ticket_id, reason, servers=self.servers)

    def expel(self, muted: Muted) -> None:
        """A peer over its budget: what was entrusted to it goes to others; it may say hello again later."""
        self.errors["muted"] += 1
        server_id = self.at(muted.identity)
        logger.warning("%s is muted: %s", server_id or "a peer without welcome", muted.reason)
        if server_id is not None:
            self.lose(server_id, muted.reason)

    def lose(self, server_id: str, reason: str, *, expected: bool = False) -> None:
        """Its tickets wait for another server."""
        del self.servers[server_id]
        returned = self._ledger.out.lose_server(server_id)
        level = logging.INFO if expected and not returned else logging.WARNING
        logger.log(level, "%s is gone: %s; %d tickets wait for another server", server_id, reason, returned)

    def say_goodbye(self, reason: str, *, run_is_finished: bool) -> None:
        self.send_to_all(Goodbye(reason=reason, expected=run_is_finished))
