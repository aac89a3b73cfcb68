"""The connected rollout servers: hello and welcome, heartbeats of both sides, and how a server is lost.

The one place that takes tickets from a server: when it is lost, fails at one, or comes back with fewer. Used by the
network thread alone; other threads may read `connected`, `aligned`, `errors` and `stalls`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.models.token_trace import TokenTrace
from learner.network.sockets import LearnerSockets
from learner.tickets.ledger import TicketLedger
from protocol.device_lock import process_birth
from protocol.endpoints import host_id
from protocol.errors import ErrorCode
from protocol.handshake import Muted, check_hello, check_mode
from protocol.messages import (
    DeviceSource,
    Error,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    ServerHeartbeat,
    TicketReturned,
    WeightManifest,
    WeightsLoaded,
    Welcome,
    Wire,
    printable,
)
from protocol.sockets import SLOWEST_TURN_S, Delivery, Encoded, Stalls

logger = logging.getLogger(__name__)

IDLE_AGAIN = 0.75
"""An idle server without tickets counts as idle for this share of network.timeout_s when it has been looked at."""
MAX_ERROR_KINDS = 64
MAX_ERROR_KIND_LENGTH = 100


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the learner's model that must equal the servers'."""

    model_fingerprint: str
    processor_fingerprint: str
    vocabulary: int
    base_fingerprint: str = ""
    """Fingerprint of the base weights' content where only adapters travel."""
    scoring: tuple[tuple[str, str], ...] = ()
    """Fingerprints of whatever scores completions (`scoring_fingerprints`)."""
    template_date: str = ""
    """Day of the run's prompts where its chat template writes one. Servers take it over."""
    traces: Mapping[str, TokenTrace] = field(default_factory=dict)
    """Traces that groups must have."""


@dataclass
class ServerState:
    """State of one welcomed server, as the learner knows it."""

    hello: Hello
    identity: bytes
    heard_at: float = field(default_factory=time.monotonic)
    heartbeat: ServerHeartbeat | None = None
    loaded: WeightsLoaded | None = None
    told: int = -1
    """Version that it was told to load last; -1: none yet."""
    idle_since: float | None = None
    """Time from which on it has reported no work."""
    aligned: bool = False
    """True if the engine computes the learner's log-probs, or no check is configured: it may have work."""
    refused: bool = False
    """True after a refusal: the server is only expected to say goodbye."""


class Servers:
    def __init__(
        self,
        network: NetworkConfig,
        mode: Literal["async", "sync"],
        quantization: str,
        run_id: str,
        sockets: LearnerSockets,
        ledger: TicketLedger,
        facts: ModelFacts,
        *,
        version: int = 0,
        device: Callable[[], DeviceSource | None] = lambda: None,
    ):
        """`device` says from which device memory versions can be fetched now, if from any."""
        self.connected: dict[str, ServerState] = {}
        """Welcomed servers by id."""
        self.errors: Counter[str] = Counter()
        """Unusable messages, refused groups and failed tickets by kind."""
        self.version = version
        """Newest policy version that a server may have; ahead of the learner's while it makes steps again."""
        self.manifest: WeightManifest | None = None
        """Manifest of the newest published version."""
        self._kept: WeightManifest | None = None
        """The version that is being evaluated: servers that have it are told of no newer one."""
        self.stalls = Stalls(min(SLOWEST_TURN_S, network.timeout_s / 2))
        """Stalls of the network thread, which looks once in each iteration."""
        self._by_identity: dict[bytes, str] = {}
        self._by_session: dict[str, str] = {}
        self._device = device
        self._network = network
        self._mode = mode
        self._quantization = quantization
        self._run_id = run_id
        self._incarnation = uuid.uuid4().hex[:12]
        self._sockets = sockets
        self._ledger = ledger
        self._facts = facts
        self.last_refusal = ""
        """Reason for which the last hello was refused, with the fix, to be put behind what is waited for."""
        self._first_scoring: dict[str, str] = {}
        """Fingerprints of the first server's files, for those that this machine has not."""
        self._beat_at = 0.0
        self._encoded: tuple[WeightManifest, Encoded] | None = None
        """The manifest that was sent last, for the next server."""

    @property
    def aligned(self) -> dict[str, ServerState]:
        """Servers that may have work."""
        return {server_id: server for server_id, server in self.connected.copy().items() if server.aligned}

    def at(self, identity: bytes) -> str | None:
        """Server id of a connection, or None."""
        return self._by_identity.get(identity)

    def of_session(self, session: str) -> str | None:
        """Server id of a welcomed server by the session of its hello, which only the server itself knows; or None."""
        return self._by_session.get(session)

    # --- hello and welcome ------------------------------------------------------------------------

    def greet(self, identity: bytes, hello: Hello) -> None:
        """Welcome, refuse, or ignore: a hello may be repeated before the welcome arrives."""
        name = self.at(identity)
        if name not in (None, hello.server_id):
            reason = f"this connection is server {name!r} already"
            self._sockets.control.send(identity, Error(code=ErrorCode.DUPLICATE_SERVER, reason=reason))
            self._sockets.control.charge(identity)
            return
        self._replace_dead(hello)
        refusal = check_mode(hello, self._mode, self._other_than(hello)) or check_hello(
            hello,
            model_fingerprint=self._facts.model_fingerprint,
            processor_fingerprint=self._facts.processor_fingerprint,
            base_fingerprint=self._facts.base_fingerprint,
            quantization=self._quantization,
            scoring={**self._first_scoring, **dict(self._facts.scoring)},
            live_server_ids={i: s.hello.session for i, s in self.connected.items()},
        )
        if refusal:
            logger.warning("%s refused: %s", hello.server_id, refusal.reason)
            self.last_refusal = f"; the last one was refused: {refusal.reason}. {refusal.fix}"
            self._sockets.control.send(identity, refusal)
            self._sockets.control.charge(identity)  # a server that is refused ends; this one may go on and on
            return
        known = self.connected.get(hello.server_id)
        if known is not None and known.identity == identity:
            return
        self._first_scoring = self._first_scoring or dict(hello.scoring)
        brought = self._ledger.out.reconcile(hello.server_id, hello.held_ticket_ids)
        back = f" with {brought} of its tickets" if brought else ""
        weights = f", {hello.quantization} weights" if hello.quantization else ""
        logger.info("%s is welcome%s (%s engine%s, pid %d)", hello.server_id, back, hello.engine, weights, hello.pid)
        if known is not None:
            self._by_identity.pop(known.identity, None)
        self.connected[hello.server_id] = ServerState(hello, identity)
        self._by_identity[identity] = self._by_session[hello.session] = hello.server_id
        if not self.send(hello.server_id, self._welcome()):
            return
        manifest = self.manifest
        if self._kept is not None and self._ledger.out.held_of_kind(hello.server_id, is_training=False):
            manifest = self._kept  # it evaluates, and goes on with it
        if manifest is not None:
            self._tell(hello.server_id, manifest)

    def _other_than(self, hello: Hello) -> Hello | None:
        return next((s.hello for s in self.connected.values() if s.hello.server_id != hello.server_id), None)

    def _replace_dead(self, hello: Hello) -> None:
        """Disconnect the shared device's server if its process has ended, without waiting for network.timeout_s."""
        tenant = self._other_than(hello) if self._mode == "sync" else None
        if tenant is not None and tenant.host_id == host_id() and process_birth(tenant.pid) is None:
            self.lose(tenant.server_id, f"its process ({tenant.pid}) has gone")

    def _welcome(self) -> Welcome:
        return Welcome(
            run_id=self._run_id,
            incarnation=self._incarnation,
            host_id=host_id(),
            version=self.version,
            weights_port=self._network.weights_port,
            heartbeat_s=self._network.heartbeat_s,
            timeout_s=self._network.timeout_s,
            device=self._device(),
            template_date=self._facts.template_date,
        )

    # --- messages and heartbeats --------------------------------------------------------------------

    def send(self, server_id: str, message: Wire | Encoded) -> bool:
        """Return False, and disconnect the server, if it could not be reached."""
        delivery = self._sockets.control.send(self.connected[server_id].identity, message)
        if delivery is not Delivery.SENT:
            self.lose(server_id, f"a message could not be delivered ({delivery})")
        return delivery is Delivery.SENT

    def send_to_all(self, message: Wire) -> None:
        encoded = self._sockets.control.encode(message)
        for server_id in list(self.connected):
            self.send(server_id, encoded)

    def announce(self, manifest: WeightManifest) -> None:
        """Tell every server of this version, before any ticket that needs it; those that evaluate hear of it later."""
        self.version, self.manifest = max(self.version, manifest.version), manifest
        keepers = self.keepers
        for server_id in list(self.connected):
            if server_id not in keepers:
                self._tell(server_id, manifest)

    def _tell(self, server_id: str, manifest: WeightManifest) -> None:
        if self._encoded is None or self._encoded[0] is not manifest:
            self._encoded = manifest, self._sockets.control.encode(manifest)
        if self.send(server_id, self._encoded[1]):
            self.connected[server_id].told = manifest.version

    @property
    def keepers(self) -> dict[str, ServerState]:
        """Aligned servers that keep the version which is being evaluated; empty where none is."""
        version = None if self._kept is None else self._kept.version
        return {server_id: server for server_id, server in self.aligned.items() if server.told == version}

    def keep_version(self) -> None:
        """Evaluate the newest version: servers that have it keep it until `release_version`."""
        self._kept = self.manifest

    def go_back(self) -> None:
        """Tell the aligned servers that have another version of the one that is being evaluated."""
        if self._kept is not None:
            for server_id in [name for name in self.aligned if name not in self.keepers]:
                self._tell(server_id, self._kept)

    def release_version(self) -> None:
        """Tell of the newest version whom it was kept from."""
        self._kept = None
        for server_id, server in list(self.connected.items()):
            if self.manifest is not None and server.told != self.manifest.version:
                self._tell(server_id, self.manifest)

    def keep_alive(self) -> None:
        """Send heartbeats when they are due, and disconnect servers that have been silent for too long."""
        now = time.monotonic()
        self._forgive_own_silence(now)
        if now - self._beat_at >= self._network.heartbeat_s:
            self._beat_at = now
            self.errors.update(self._sockets.take_rejections())
            self.send_to_all(LearnerHeartbeat(version=self.version))
        for server_id, server in list(self.connected.items()):
            silent_s = now - server.heard_at
            if silent_s > self._network.timeout_s:
                self.lose(server_id, f"silent for {silent_s:.0f} s (network.timeout_s)")

    def _forgive_own_silence(self, now: float) -> None:
        """Extend server deadlines by the time this process was stalled: messages are still unread."""
        stalled_s = self.stalls.look(now)
        if not stalled_s:
            return
        logger.warning("this learner was suspended or blocked for %.0f s", stalled_s)
        self._ledger.out.forgive(stalled_s)
        for server in self.connected.values():
            server.heard_at += stalled_s
            if server.idle_since is not None:
                server.idle_since += stalled_s

    def take_heartbeat(self, server_id: str, beat: ServerHeartbeat) -> None:
        """Record a heartbeat; disconnect a server that ignores its tickets (reports no work for network.timeout_s)."""
        server, now, limit_s = self.connected[server_id], time.monotonic(), self._network.timeout_s
        server.heartbeat = beat
        if beat.groups_queued or beat.groups_running or beat.groups_unacknowledged:
            server.idle_since = None
        elif server.idle_since is None:
            server.idle_since = now
        elif now - server.idle_since > limit_s:
            if self._ledger.out.holds_since(server_id, now - limit_s):
                self.lose(server_id, "it holds tickets, but has reported no work for network.timeout_s")
            else:
                server.idle_since = now - IDLE_AGAIN * limit_s  # looking costs: not at each heartbeat of each server

    # --- failures and the end -----------------------------------------------------------------------

    def count_error(self, kind: str) -> None:
        """Count an error under a bounded number of kinds: `kind` may be the peer's own word, and labels a metric."""
        known = kind in self.errors or len(self.errors) < MAX_ERROR_KINDS
        self.errors[kind[:MAX_ERROR_KIND_LENGTH] if known else "other"] += 1

    def give_back(self, ticket_id: int, server_id: str, reason: str) -> bool:
        """Take a ticket from a server that failed at it; see `OutstandingTickets.give_back`."""
        item = self._ledger.out.get(ticket_id)
        could_try = self.connected if item is None or item.is_training else self.keepers
        return self._ledger.out.give_back(ticket_id, server_id, reason, could_try)

    def take_return(self, server_id: str, returned: TicketReturned) -> bool:
        """Take a ticket back as it is; what does not fit it is a failure. False if the server does not hold it."""
        try:
            if (newest := returned.partial.versions.max(initial=0)) > self.version:
                raise ValueError(f"a partial token of version {newest}, at version {self.version}")
            return self._ledger.out.take_return(returned.ticket_id, server_id, returned.partial)
        except ValueError as problem:
            reason = printable(str(problem))
            self.errors[str(ErrorCode.REFUSED_GROUP)] += 1
            logger.warning("what %s has sampled of ticket %d is refused: %s", server_id, returned.ticket_id, reason)
            return self.give_back(returned.ticket_id, server_id, reason)

    def expel(self, muted: Muted) -> None:
        """Disconnect a peer over its message budget; it may say hello again later."""
        self.errors["muted"] += 1
        server_id = self.at(muted.identity)
        logger.warning("%s is muted: %s", server_id or "a peer without welcome", muted.reason)
        if server_id is not None:
            self.lose(server_id, muted.reason)

    def lose(self, server_id: str, reason: str, *, expected: bool = False) -> None:
        """Disconnect a server and requeue its tickets."""
        server = self.connected.pop(server_id)
        self._by_identity.pop(server.identity, None)
        self._by_session.pop(server.hello.session, None)
        held = self._ledger.out.held_by(server_id)
        self._ledger.out.reconcile(server_id)
        level = logging.INFO if expected and not held else logging.WARNING
        logger.log(level, "%s is gone: %s; %d tickets wait for another server", server_id, reason, held)

    def take_goodbye(self, identity: bytes, message: Goodbye) -> None:
        server_id = self.at(identity)
        if server_id is not None:
            self.lose(server_id, f"said goodbye ({message.reason})", expected=message.expected)
