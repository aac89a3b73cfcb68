"""The learner's sockets, on a thread of their own.

Reading order: this loop; `connections` (who is there), `alignment` (who may have work),
`handout` (tickets out), `intake` (groups in). The main thread
trains and never touches a socket: it hands over published versions and evaluation requests, and waits on the ledger's
`changed` condition. A failure here is kept in `failure` and raised by the waiting side.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import zmq

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.telemetry.timeline import Timeline
from learner.network.blob_traffic import BlobTraffic
from learner.network.device_weights import DeviceWeights
from learner.network.group_receiver import GroupReceiver
from learner.network.lease_grants import LeaseGrants
from learner.network.mailbox import ThreadMailbox
from learner.network.parity_handshake import ParityCheck, ParityHandshake
from learner.network.ports import open_ports
from learner.network.server_spans import note
from learner.network.servers import ModelFacts, Servers, ServerState
from learner.network.ticket_sender import TicketSender
from learner.network.verification import verify_group
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket import PreparedTicket
from protocol.errors import ErrorCode
from protocol.messages import (
    ChunkRequest,
    Error,
    Goodbye,
    Group,
    Hello,
    LeaseReturn,
    Message,
    ServerHeartbeat,
    TicketFailed,
    TransferEnd,
    TransferRequest,
    TransferStart,
    WeightManifest,
    WeightsLoaded,
)
from protocol.peers import Muted
from protocol.sockets import BadMessage, Received
from protocol.transfer import answer_chunk_request
from protocol.weights import Publication

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Longest time between two looks at heartbeats, and at what the main thread has handed over."""
PARTING_S = 5.0
"""Longest wait for the servers' goodbyes."""


class NetworkThread(threading.Thread):
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
        parity_tickets: Sequence[PreparedTicket] = (),
        device_weights: DeviceWeights | None = None,
    ):
        super().__init__(name="exchange", daemon=True)
        self.failure: Exception | None = None
        self.timeline = Timeline()
        self._ledger = ledger
        self._publication = publication
        self._device_weights = device_weights
        self._version = version
        """Newest policy version that a server may have; ahead of the learner's while it makes steps again."""
        self._stopping = False
        self._goodbye: str | None = None
        self._run_is_finished = False
        self._context = zmq.Context()
        self._ports = open_ports(config, self._context)
        self.control, self.weights = self._ports.control, self._ports.weights
        self._orders = ThreadMailbox(self._context)
        self._connections = Servers(config, run_id, self._ports, ledger, facts)
        if device_weights is not None:
            self._connections.device = lambda: device_weights.source
        self._lending = LeaseGrants(self._connections)
        self._handout = TicketSender(self._connections, ledger, write_ticket, self.control.limits)
        verify = partial(verify_group, vocabulary=facts.vocabulary, components=config.reward.component_names)
        self._intake = GroupReceiver(self._connections, self._ports, ledger, verify)
        self.alignment = ParityHandshake(
            self._connections,
            ledger,
            parity_tickets,
            verify,
            limits=self.control.limits,
            deadline_s=min(config.network.start_timeout_s, config.learner.wait_timeout_s / 2),
            can_answer=self._lending.is_at_work if config.trainer.mode == "sync" else lambda server: True,
        )

    # --- the main thread's side ---------------------------------------------------------------

    @property
    def servers(self) -> dict[str, ServerState]:
        return self._connections.servers

    @property
    def errors(self) -> Counter[str]:
        return self._connections.errors

    @property
    def looked_at(self) -> float:
        """When this thread last looked at its sockets, in monotonic seconds."""
        return self._connections.looked_at

    @property
    def published_bytes(self) -> int:
        """Of the versions that servers may still fetch."""
        return self._publication.nbytes

    @property
    def blobs(self) -> BlobTraffic:
        """Of the tickets that went out."""
        return self._handout.blobs

    @property
    def credits(self) -> int:
        """Groups that aligned servers would take, beyond what they hold."""
        aligned = self._connections.aligned
        return sum(max(0, s.hello.max_groups - self._ledger.out.held_by(i)) for i, s in aligned.items())

    @property
    def groups_not_durable(self) -> int:
        """Verified, and neither journaled nor acknowledged."""
        return self._intake.num_arrived

    def tell_lag(self, on_kept: Callable[[np.ndarray], None]) -> None:
        """Before the start. Called on the exchange thread: see `Intake.on_kept`."""
        self._intake.on_kept = on_kept

    def announce(self, manifest: WeightManifest) -> None:
        """Every server is told of this version before any ticket that needs it."""

        def order() -> None:
            self._version = manifest.version
            self._connections.publish(manifest)

        self._orders.give(order)

    def admit(self, version: int) -> None:
        """From now on, training tickets go out as far as the ledger admits them before `version`."""

        def order() -> None:
            self._handout.admitted = version

        self._orders.give(order)

    def dispatch(self, prepare: Callable[[], Iterable[PreparedTicket]]) -> None:
        """Prepare tickets on the exchange thread, then issue them all at once."""
        self._orders.give(lambda: self._handout.prepare(prepare))

    def accept_server(self, check: ParityCheck) -> None:
        """Engine and learner agree."""
        self._orders.give(lambda: self.alignment.accept_server(check))

    def repeat_parity(self, check: ParityCheck) -> None:
        self._orders.give(lambda: self.alignment.repeat(check))

    def refuse_server(self, check: ParityCheck, reason: str, fix: str) -> None:
        self._orders.give(lambda: self.alignment.refuse(check, reason, fix))

    def lend(self, fence: int) -> None:
        """The device is free: a server may take its lease under this fence or a larger one."""
        self._orders.give(lambda: self._lending.lend(fence))

    def recall(self) -> None:
        """The server is to return the device's lease."""
        self._orders.give(self._lending.recall)

    @property
    def lease_returned(self) -> LeaseReturn | None:
        """What the server last said of its turn."""
        return self._lending.returned

    def stop(self, reason: str | None, *, run_is_finished: bool = False) -> None:
        """End the thread, and say goodbye to every server unless `reason` is None: then they wait for our return."""

        def order() -> None:
            self._stopping = True
            self._goodbye = reason
            self._run_is_finished = run_is_finished

        if self.is_alive():
            self._orders.give(order)
            self.join(timeout=2 * PARTING_S)
        self._ports.close()
        self._orders.close()
        self._context.term()  # returns when the goodbyes are on their way, or after the sockets' linger

    def check(self) -> None:
        """Raises what has ended the thread."""
        if self.failure is not None:
            raise self.failure

    # --- the exchange thread --------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._exchange_until_stopped()
        except Exception as error:  # raised again by the main thread's next wait, which then says goodbye
            logger.error("the exchange stops: %s", error)
            if isinstance(error, BadStateError | UserError):  # from a crash, a learner comes back
                self._goodbye = f"the learner failed: {error}"
            with self._ledger.changed:
                self.failure = error
                self._ledger.changed.notify_all()
        if self._goodbye is not None:
            self._part(self._goodbye)

    def _exchange_until_stopped(self) -> None:
        poller = zmq.Poller()
        for socket in (self.control.socket, self.weights.socket, self._orders.given):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            poller.poll(0 if self._handout.is_busy else round(POLL_S * 1000))
            self._orders.obey()
            self._receive_control()
            self._intake.keep()
            self._serve_weights()
            self.alignment.work()
            self._handout.work()
            self._lending.offer()
            self._connections.keep_alive(self._version)

    def _part(self, reason: str) -> None:
        """Say goodbye and wait for each server's: closing the socket at once could take ours back."""
        self._connections.say_goodbye(reason, run_is_finished=self._run_is_finished)
        deadline = time.monotonic() + PARTING_S
        while self.servers and time.monotonic() < deadline:
            self.control.socket.poll(round(POLL_S * 1000))
            for received in self.control.turn():
                if isinstance(received, Received) and isinstance(received.message, Goodbye):
                    self._say_farewell(received.identity, received.message)
        self._intake.forget()
        if self.servers:
            logger.warning("no goodbye from %s within %g s", sorted(self.servers), PARTING_S)

    def _say_farewell(self, identity: bytes, message: Goodbye) -> None:
        server_id = self._connections.at(identity)
        if server_id is not None:
            self._connections.lose(server_id, f"said goodbye ({message.reason})", expected=message.expected)

    def _receive_control(self) -> None:
        for received in self.control.turn():
            if isinstance(received, Muted):
                self._connections.expel(received)
            elif isinstance(received, BadMessage):
                self.errors[str(received.error.code)] += 1
                logger.warning("a message could not be used: %s", received.error)
            else:
                self._handle(received)

    def _handle(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Hello):
            self._connections.greet(received.identity, message, self._version)
            return
        server_id = self._connections.at(received.identity)
        if server_id is None:
            self.control.send(received.identity, Error(code=ErrorCode.NOT_WELCOME, reason="say hello first"))
            return
        server = self.servers[server_id]
        server.heard_at = time.monotonic()
        note(self.timeline, server_id, message)
        if server.refused and not isinstance(message, Goodbye):
            return
        if isinstance(message, Group) and self.alignment.awaits(server_id, message.ticket_id):
            self.alignment.accept(server_id, message, self._version)
        elif isinstance(message, Group):
            self._intake.accept(server_id, message, received.frames, self._version)
        else:
            self._handle_from(server_id, message)

    def _handle_from(self, server_id: str, message: Message) -> None:
        connections = self._connections
        if isinstance(message, ServerHeartbeat):
            connections.take_pulse(server_id, message)
        elif isinstance(message, WeightsLoaded):
            self.servers[server_id].loaded = message
        elif isinstance(message, TicketFailed):
            connections.count_error(message.error_kind)
            logger.warning("ticket %d failed on %s: %s", message.ticket_id, server_id, message.error_message)
            if self.alignment.awaits(server_id, message.ticket_id):
                self.alignment.fail(server_id, message)
            elif not self._intake.has(message.ticket_id):
                connections.give_back(message.ticket_id, server_id, f"{message.error_kind}: {message.error_message}")
        elif isinstance(message, LeaseReturn):
            self._lending.take_return(self.servers[server_id], message)
        elif isinstance(message, Goodbye):
            self._say_farewell(self.servers[server_id].identity, message)
        elif isinstance(message, Error):
            self.errors[str(message.code)] += 1
            logger.warning("%s answers %s: %s", server_id, message.code, message.reason)

    def _serve_weights(self) -> None:
        for received in self.weights.turn():
            if isinstance(received, Muted):
                self.errors["muted"] += 1
                logger.warning("a reader of weights is muted: %s", received.reason)
            elif isinstance(received, BadMessage):
                self.errors[str(received.error.code)] += 1
            elif isinstance(received.message, ChunkRequest):
                # A chunk that finds the reader's queue full is dropped: the reader asks again.
                self.weights.send(received.identity, answer_chunk_request(self._publication, received.message))
            elif isinstance(received.message, TransferRequest):
                self.weights.send(received.identity, self._begin_transfer(received.identity, received.message))
            elif isinstance(received.message, TransferEnd) and self._device_weights is not None:
                self._device_weights.end(received.identity, received.message)

    def _begin_transfer(self, identity: bytes, request: TransferRequest) -> TransferStart | Error:
        if self._device_weights is not None:
            return self._device_weights.answer(identity, request)
        reason = (
            f"this learner sends nothing over {request.channel}: it shares its device, has a budget for its "
            "memory (gpu_memory.budget_gib), or trains adapters"
        )
        return Error(code=ErrorCode.WRONG_CHANNEL, reason=reason, version=request.version)
