"""The learner's sockets, on a thread of their own: who is connected, tickets out, verified groups in, weights.

The main thread trains and never touches a socket; it hands over published versions and evaluation requests, and
waits on the ledger's `changed` condition. A failure here is kept in `failure` and raised by the waiting side.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.faults import crash_point
from learner.journal import TicketSlot
from learner.ports import open_ports
from learner.ticket_writer import EVALUATION_IDS
from learner.tickets import PreparedTicket, ReceivedGroup, TicketLedger
from learner.verification import verify_group
from protocol.endpoints import host_id
from protocol.errors import ErrorCode, ProtocolError
from protocol.handshake import check_hello
from protocol.messages import (
    Ack,
    ChunkRequest,
    Error,
    Goodbye,
    Group,
    Hello,
    LearnerHeartbeat,
    Message,
    ServerHeartbeat,
    TicketFailed,
    Tickets,
    WeightManifest,
    WeightsLoaded,
    Welcome,
    Wire,
)
from protocol.peers import Muted
from protocol.sockets import BadMessage, Delivery, Received
from protocol.transfer import answer_chunk_request
from protocol.weights import Publication

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""Longest time between two looks at heartbeats and at what the main thread has handed over."""
MAX_ERROR_KINDS = 64
MAX_ERROR_KIND_LENGTH = 100
PARTING_S = 5.0
"""Longest wait for the servers' goodbyes."""


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


@dataclass
class _Preparation:
    """Tickets of one order: how to make them, those still to be made, and those ready."""

    prepare: Callable[[], Iterable[PreparedTicket]]
    items: Iterator[PreparedTicket] | None = None
    done: list[PreparedTicket] = field(default_factory=list)


@dataclass(frozen=True)
class ModelFacts:
    """What the learner's model must have in common with the servers'."""

    model_fingerprint: str
    processor_fingerprint: str
    vocabulary: int


class Exchange(threading.Thread):
    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        *,
        ledger: TicketLedger,
        write_ticket: Callable[[TicketSlot], PreparedTicket],
        publication: Publication,
        facts: ModelFacts,
        version: int,
    ):
        super().__init__(name="exchange", daemon=True)
        self.servers: dict[str, ServerState] = {}
        self.failure: Exception | None = None
        self.errors: Counter[str] = Counter()
        """Unusable messages, refused groups and failed tickets by kind."""
        self._config = config
        self._run_id = run_id
        self._incarnation = uuid.uuid4().hex[:12]
        self._ledger = ledger
        self._write_ticket = write_ticket
        self._publication = publication
        self._facts = facts
        self._version = version
        """Newest policy version that a server may have; ahead of the learner's while it makes steps again."""
        self._manifest: WeightManifest | None = None
        self._admitted: int | None = None
        self._arrived: dict[int, tuple[str, ReceivedGroup]] = {}
        """Verified in this turn: journaled and acknowledged together at its end."""
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._goodbye: str | None = None
        self._preparing: deque[_Preparation] = deque()
        self._beat_at = 0.0
        self._context = zmq.Context()
        self._ports = open_ports(config, self._context)
        self.control, self.weights = self._ports.control, self._ports.weights
        self._waker, self._woken = _wake_up_pair(self._context)

    # --- the main thread's side ---------------------------------------------------------------

    def announce(self, manifest: WeightManifest) -> None:
        """Every server is told of this version before any ticket that needs it."""

        def order() -> None:
            self._version, self._manifest = manifest.version, manifest
            for server_id in list(self.servers):
                self._send(server_id, manifest)

        self._order(order)

    def admit(self, version: int) -> None:
        """From now on, training tickets go out as far as the ledger admits them before `version`."""

        def order() -> None:
            self._admitted = version

        self._order(order)

    def dispatch(self, prepare: Callable[[], Iterable[PreparedTicket]]) -> None:
        """Prepare tickets on the exchange thread, then issue them all at once."""
        self._order(lambda: self._preparing.append(_Preparation(prepare)))

    def stop(self, reason: str | None) -> None:
        """End the thread, and say goodbye to every server unless `reason` is None: then they wait for our return."""

        def order() -> None:
            self._stopping = True
            self._goodbye = reason

        if self.is_alive():
            self._order(order)
            self.join(timeout=2 * PARTING_S)
        self._ports.close()
        for socket in (self._woken, self._waker):
            socket.close()
        self._context.term()  # returns when the goodbyes are on their way, or after the sockets' linger

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._waker.send(b"")

    # --- the exchange thread --------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._exchange_until_goodbye()
        except Exception as error:  # raised again by the main thread's next wait, which then says goodbye
            logger.error("the exchange stops: %s", error)
            if isinstance(error, BadStateError | UserError):  # from a crash, a learner comes back
                self._goodbye = f"the learner failed: {error}"
            with self._ledger.changed:
                self.failure = error
                self._ledger.changed.notify_all()
        if self._goodbye is not None:
            self._part(self._goodbye)

    def _exchange_until_goodbye(self) -> None:
        poller = zmq.Poller()
        for socket in (self.control.socket, self.weights.socket, self._woken):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            poller.poll(0 if self._preparing else round(POLL_S * 1000))
            self._obey_orders()
            self._admit_tickets()
            self._prepare_some()
            self._receive_control()
            self._keep_arrived()
            self._answer_chunk_requests()
            self._send_waiting_tickets()
            self._keep_alive()

    def _part(self, reason: str) -> None:
        """Say goodbye and wait for each server's: closing the socket at once could take ours back."""
        for server_id in list(self.servers):
            self._send(server_id, Goodbye(reason=reason))
        deadline = time.monotonic() + PARTING_S
        while self.servers and time.monotonic() < deadline:
            self.control.socket.poll(round(POLL_S * 1000))
            self._receive_control()
        self._arrived.clear()  # not acknowledged: their servers keep them for the next learner
        if self.servers:
            logger.warning("no goodbye from %s within %g s", sorted(self.servers), PARTING_S)

    def _obey_orders(self) -> None:
        while self._woken.poll(0):
            self._woken.recv()
        while not self._orders.empty():
            self._orders.get_nowait()()

    def _admit_tickets(self) -> None:
        """All tickets that may go out now, together. One preparation at a time: it decides what is admissible next."""
        if self._admitted is None or self._preparing:
            return
        slots = self._ledger.admissible(self._admitted)
        if slots:
            self._preparing.append(_Preparation(lambda: (self._write_ticket(slot) for slot in slots)))

    def _prepare_some(self) -> None:
        """A slice of the oldest preparation: reading and encoding many images must not silence the heartbeat."""
        deadline = time.monotonic() + POLL_S
        while self._preparing and time.monotonic() < deadline:
            preparation = self._preparing[0]
            if preparation.items is None:
                preparation.items = iter(preparation.prepare())
            item = next(preparation.items, None)
            if item is None:
                self._ledger.issue(preparation.done)
                self._preparing.popleft()
            else:
                preparation.done.append(item)

    def _receive_control(self) -> None:
        for received in self.control.turn():
            if isinstance(received, Muted):
                self._expel(received)
            elif isinstance(received, BadMessage):
                self.errors[str(received.error.code)] += 1
                logger.warning("a message could not be used: %s", received.error)
            else:
                self._handle(received)

    def _handle(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Hello):
            self._greet(received.identity, message)
            return
        server_id = self._server_at(received.identity)
        if server_id is None:
            error = Error(code=ErrorCode.NOT_WELCOME, reason="say hello first")
            self.control.send(received.identity, error)
            return
        server = self.servers[server_id]
        server.heard_at = time.monotonic()
        self._handle_from(server_id, server, message)

    def _handle_from(self, server_id: str, server: ServerState, message: Message) -> None:
        if isinstance(message, Group):
            self._accept(server_id, message)
        elif isinstance(message, ServerHeartbeat):
            server.heartbeat = message
            self._check_that_it_reads(server_id, server, message)
        elif isinstance(message, WeightsLoaded):
            server.loaded = message
        elif isinstance(message, TicketFailed):
            self._count_error(message.error_kind)
            logger.warning("ticket %d failed on %s: %s", message.ticket_id, server_id, message.error_message)
            self._give_back(message.ticket_id, server_id, f"{message.error_kind}: {message.error_message}")
        elif isinstance(message, Goodbye):
            self._lose(server_id, f"said goodbye ({message.reason})", expected=message.expected)
        elif isinstance(message, Error):
            self.errors[str(message.code)] += 1
            logger.warning("%s answers %s: %s", server_id, message.code, message.reason)

    def _count_error(self, kind: str) -> None:
        """`kind` may be the peer's own word: only so many become keys, and labels of a metric."""
        known = kind in self.errors or len(self.errors) < MAX_ERROR_KINDS
        self.errors[kind[:MAX_ERROR_KIND_LENGTH] if known else "other"] += 1

    def _give_back(self, ticket_id: int, server_id: str, reason: str) -> None:
        """A ticket that this server failed at. What another server holds is not its to return."""
        if self._ledger.holder(ticket_id) == server_id:
            self._ledger.give_back(ticket_id, reason, servers=self.servers)

    def _check_that_it_reads(self, server_id: str, server: ServerState, beat: ServerHeartbeat) -> None:
        """One that says it has no work, though tickets went to it long ago, sends without reading."""
        idle = not (beat.groups_queued or beat.groups_running or beat.groups_unacknowledged)
        if not idle or not self._ledger.held_by(server_id):
            server.idle_since = None
        elif server.idle_since is None:
            server.idle_since = time.monotonic()
        elif time.monotonic() - server.idle_since > self._config.network.timeout_s:
            self._lose(server_id, "it holds tickets, and has said for network.timeout_s that it has none")

    def _greet(self, identity: bytes, hello: Hello) -> None:
        name = self._server_at(identity)
        if name not in (None, hello.server_id):
            reason = f"this connection is server {name!r} already"
            self.control.send(identity, Error(code=ErrorCode.DUPLICATE_SERVER, reason=reason))
            self.control.charge(identity)
            return
        refusal = check_hello(
            hello,
            model_fingerprint=self._facts.model_fingerprint,
            processor_fingerprint=self._facts.processor_fingerprint,
            live_server_ids={i: s.hello.session for i, s in self.servers.items()},
        )
        if refusal:
            logger.warning("%s refused: %s", hello.server_id, refusal.reason)
            self.control.send(identity, refusal)
            return
        known = self.servers.get(hello.server_id)
        if known is not None and known.identity == identity:
            return  # a repeated hello; the welcome is on its way
        brought = self._ledger.reconcile(hello.server_id, hello.held_ticket_ids)
        back = f" with {brought} of its tickets" if brought else ""
        logger.info("%s is welcome%s (%s engine, pid %d)", hello.server_id, back, hello.engine, hello.pid)
        self.servers[hello.server_id] = ServerState(hello, identity)
        welcome = Welcome(
            run_id=self._run_id,
            incarnation=self._incarnation,
            host_id=host_id(),
            version=self._version,
            weights_port=self._config.network.weights_port,
            heartbeat_s=self._config.network.heartbeat_s,
            timeout_s=self._config.network.timeout_s,
        )
        if self._send(hello.server_id, welcome) and self._manifest is not None:
            self._send(hello.server_id, self._manifest)

    def _accept(self, server_id: str, group: Group) -> None:
        """Verify, journal, acknowledge, in this order; the last two at the end of the turn, for all groups at once."""
        if group.ticket_id in self._arrived:
            return
        prepared = self._ledger.outstanding(group.ticket_id)
        if prepared is None:
            self._answer_unawaited(server_id, group.ticket_id)
            return
        try:
            verify_group(
                group, prepared.ticket, prepared.facts, version=self._version, vocabulary=self._facts.vocabulary
            )
        except ProtocolError as error:
            self.errors[str(error.code)] += 1
            logger.warning("group of ticket %d refused: %s", group.ticket_id, error.reason)
            self.control.charge(self.servers[server_id].identity)
            self._give_back(group.ticket_id, server_id, error.reason)
            self._send(server_id, Error(code=error.code, reason=error.reason, ticket_id=group.ticket_id))
            return
        crash_point("group.verified")
        self._arrived[group.ticket_id] = (server_id, ReceivedGroup(prepared, group))

    def _answer_unawaited(self, server_id: str, ticket_id: int) -> None:
        """A duplicate is acknowledged again. What was never issued is another run's, or garbage."""
        if ticket_id >= EVALUATION_IDS or self._ledger.was_issued(ticket_id):
            self._send(server_id, Ack(ticket_ids=(ticket_id,)))
            return
        self.errors[str(ErrorCode.UNKNOWN_TICKET)] += 1
        reason = f"this run has not issued ticket {ticket_id}"
        self._send(server_id, Error(code=ErrorCode.UNKNOWN_TICKET, reason=reason, ticket_id=ticket_id))

    def _keep_arrived(self) -> None:
        if not self._arrived:
            return
        self._ledger.receive([received for _, received in self._arrived.values()])
        crash_point("group.journaled")
        owners: dict[str, list[int]] = defaultdict(list)
        for ticket_id, (server_id, _) in self._arrived.items():
            owners[server_id].append(ticket_id)
        self._arrived.clear()
        for server_id, ticket_ids in owners.items():
            if server_id in self.servers:  # one that has left asks again when it is back
                self._send(server_id, Ack(ticket_ids=tuple(ticket_ids)))
                crash_point("group.acknowledged")

    def _answer_chunk_requests(self) -> None:
        for received in self.weights.turn():
            if isinstance(received, Muted):
                self.errors["muted"] += 1
                logger.warning("a reader of weights is muted: %s", received.reason)
            elif isinstance(received, BadMessage):
                self.errors[str(received.error.code)] += 1
            elif isinstance(received.message, ChunkRequest):
                # A chunk that finds the reader's queue full is dropped: the reader asks again.
                self.weights.send(received.identity, answer_chunk_request(self._publication, received.message))

    def _send_waiting_tickets(self) -> None:
        """Spread waiting tickets over the servers; each gets its share in one message, admitted together."""
        waiting = self._ledger.waiting()
        servers = sorted(self.servers, key=self._ledger.held_by)
        for place, server_id in enumerate(servers):
            if not waiting:
                return
            room = self.servers[server_id].hello.max_groups - self._ledger.held_by(server_id)
            share = -(-len(waiting) // (len(servers) - place))
            suitable = [item for item in waiting if self._ledger.may_try(item.ticket.ticket_id, server_id, servers)]
            chosen = self._that_fit(suitable[: max(0, min(room, share))])
            gone = {item.ticket.ticket_id for item in chosen}
            waiting = [item for item in waiting if item.ticket.ticket_id not in gone]
            if not chosen:
                continue
            blobs = {digest: memoryview(data) for item in chosen for digest, data in item.blobs.items()}
            if self._send(server_id, Tickets(tickets=tuple(item.ticket for item in chosen), blobs=blobs)):
                self._ledger.assign([item.ticket.ticket_id for item in chosen], server_id)
                crash_point("tickets.sent")

    def _that_fit(self, tickets: Sequence[PreparedTicket]) -> Sequence[PreparedTicket]:
        """As many, from the first, as one message may carry; the rest goes out in the next turn."""
        limits, frames, size = self.control.limits, 0, 0
        for count, item in enumerate(tickets):
            frames += len(item.blobs)
            size += sum(len(data) for data in item.blobs.values())
            if count and (frames >= limits.max_frames or size > limits.max_message_bytes // 2):
                return tickets[:count]
        return tickets

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._config.network.heartbeat_s:
            self._beat_at = now
            self.errors.update(self._ports.take_rejections())
            for server_id in list(self.servers):
                self._send(server_id, LearnerHeartbeat(version=self._version, step=self._version))
        for server_id, server in list(self.servers.items()):
            silent_s = now - server.heard_at
            if silent_s > self._config.network.timeout_s:
                self._lose(server_id, f"silent for {silent_s:.0f} s (network.timeout_s)")

    def _expel(self, muted: Muted) -> None:
        """A peer over its budget: what was entrusted to it goes to others; it may say hello again later."""
        self.errors["muted"] += 1
        server_id = self._server_at(muted.identity)
        logger.warning("%s is muted: %s", server_id or "a peer without welcome", muted.reason)
        if server_id is not None:
            self._lose(server_id, muted.reason)

    def _server_at(self, identity: bytes) -> str | None:
        return next((i for i, s in self.servers.items() if s.identity == identity), None)

    def _send(self, server_id: str, message: Wire) -> bool:
        """False if the server could not be reached; it is then lost."""
        delivery = self.control.send(self.servers[server_id].identity, message)
        if delivery is not Delivery.SENT:
            self._lose(server_id, f"a message could not be delivered ({delivery})")
        return delivery is Delivery.SENT

    def _lose(self, server_id: str, reason: str, *, expected: bool = False) -> None:
        del self.servers[server_id]
        returned = self._ledger.lose_server(server_id)
        level = logging.INFO if expected and not returned else logging.WARNING
        logger.log(level, "%s is gone: %s; %d tickets wait for another server", server_id, reason, returned)


def wait_for(
    exchange: Exchange,
    ledger: TicketLedger,
    satisfied: Callable[[], bool],
    *,
    timeout_s: float,
    what: Callable[[], str],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Block until `satisfied`, calling `progress` about once a second.

    Raises the exchange's failure, or BadStateError saying what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with ledger.changed:
            if exchange.failure is not None:
                raise exchange.failure
            if satisfied():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise BadStateError(f"waited {timeout_s:g} s for {what()}")
            woken = ledger.changed.wait(min(left, 1.0))
        if not woken:
            progress()


def _wake_up_pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A connected pair inside the process: what one thread sends ends the other's poll."""
    woken, waker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    address = f"inproc://wake-{id(woken):x}"
    woken.bind(address)
    waker.connect(address)
    for socket in (woken, waker):
        socket.setsockopt(zmq.LINGER, 0)
    return waker, woken
