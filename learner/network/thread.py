"""The network thread: one loop over the learner's two sockets.

Reading order: this loop, and its parts: `servers` (connections), `parity_handshake` (may a server have work?),
`ticket_sender` (tickets out), `group_receiver` (groups in), `device_lease` (sync mode). The
parts belong to this thread. The main thread trains and never touches a socket: it reads the parts' public attributes,
asks for more with `call_soon`, and waits with `wait_until`. A failure here is kept in `failure` and raised by the
waiting side.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from asyncrl.config.part_settings import NetworkSettings
from asyncrl.errors import BadStateError, UserError, WaitTimeoutError
from asyncrl.journal.writer import TicketSlot
from asyncrl.telemetry.timeline import Timeline
from learner.groups.group_verification import verify_group
from learner.groups.ticket import PreparedTicket
from learner.network.device_lease import LeaseGrants
from learner.network.group_receiver import GroupReceiver
from learner.network.parity_handshake import ParityHandshake
from learner.network.publication import DeviceSender, OpenSources
from learner.network.servers import ModelFacts, Servers
from learner.network.sockets import open_sockets
from learner.network.ticket_sender import EvaluationSender, TicketSender
from learner.tickets.ledger import TicketLedger
from protocol.download import answer_chunk_request
from protocol.errors import ErrorCode
from protocol.handshake import Muted
from protocol.messages import (
    Ack,
    Chunk,
    ChunkRequest,
    Error,
    Goodbye,
    Group,
    Hello,
    LeaseReturn,
    Message,
    ServerHeartbeat,
    SourceRequest,
    TicketFailed,
    TicketReturned,
    TransferEnd,
    TransferRequest,
    WeightsLoaded,
)
from protocol.sockets import BadMessage, Delivery, Received
from protocol.weights import Publication

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Longest time between two iterations: heartbeats, and what the main thread has asked for, wait no longer."""
PARTING_S = 5.0
"""Longest wait for the servers' goodbyes."""
_CHECK_EVERY_S = 1.0
"""Interval at which a wait of the main thread looks at its deadline."""


class ThreadMailbox:
    """Calls that threads make on another one, which sleeps in a poll.

    `post` on any of them; poll `wakeup` and `run` on the other.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]):
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self.wakeup, self._waker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.wakeup.bind(f"inproc://wake-{id(self):x}")
        self._waker.connect(f"inproc://wake-{id(self):x}")

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        with self._guard:
            self._waker.send(b"")

    def run(self) -> None:
        """Make the calls in their order."""
        while self.wakeup.poll(0):
            self.wakeup.recv()
        while not self._calls.empty():
            self._calls.get_nowait()()

    def close(self) -> None:
        for socket in (self.wakeup, self._waker):
            socket.close(linger=0)


class NetworkThread:
    def __init__(
        self,
        settings: NetworkSettings,
        run_id: str,
        *,
        ledger: TicketLedger,
        write_ticket: Callable[[TicketSlot], PreparedTicket],
        publication: Publication,
        facts: ModelFacts,
        version: int,
        parity_tickets: Sequence[PreparedTicket] = (),
        device_sender: DeviceSender | None = None,
        open_sources: OpenSources = lambda servers, publication, known_keys: None,
        check_run: Callable[[], None] = lambda: None,
    ):
        """`check_run` raises where another rank of the learner has ended, or the run is to stop."""
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._check_run = check_run
        self.failure: Exception | None = None
        self.timeline = Timeline()
        self.publication = publication
        self._ledger = ledger
        self._device_sender = device_sender
        self._stopping = False
        self._goodbye: str | None = None
        self._run_is_finished = False
        self._context = zmq.Context()
        self._sockets = open_sockets(settings.network, settings.largest_group_bytes, self._context)
        self.control, self.weights = self._sockets.control, self._sockets.weights
        self._mailbox = ThreadMailbox(self._context)
        device = (lambda: device_sender.source) if device_sender else (lambda: None)
        self.servers = Servers(
            settings.network,
            settings.mode,
            settings.quantization,
            run_id,
            self._sockets,
            ledger,
            facts,
            version=version,
            device=device,
        )
        self.weights_sent_bytes = 0
        """Bytes of weights in chunks that the learner has sent."""
        self._sources = open_sources(self.servers, publication, self._sockets.known_keys)
        self.lease = LeaseGrants(self.servers)
        self.tickets = TicketSender(self.servers, ledger, write_ticket, self.control.limits)
        self.evaluations = EvaluationSender(self.servers, ledger, self.tickets, publication)
        verify = partial(
            verify_group,
            vocabulary=facts.vocabulary,
            traces=facts.traces,
            components=settings.components,
            max_prompt_length=settings.max_prompt_length,
        )
        self._told_at = -_CHECK_EVERY_S
        """Time of the last call of a wait's `progress`."""
        self.groups = GroupReceiver(self.servers, self._sockets, ledger, verify)
        self.parity = ParityHandshake(
            self.servers,
            ledger,
            parity_tickets,
            verify,
            deadline_s=settings.first_meeting_s,
            can_answer=self.lease.is_at_work if settings.mode == "sync" else lambda server: True,
        )

    # --- the main thread's side ---------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def call_soon(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method of one of the parts on the network thread, after those that were asked for before."""
        self._mailbox.post(partial(method, *args))

    def wait_until(
        self,
        satisfied: Callable[[], bool],
        *,
        timeout_s: float,
        what: Callable[[], str],
        progress: Callable[[], None] = lambda: None,
        judge: Callable[[], None] | None = None,
    ) -> None:
        """Block until `satisfied`, calling `progress` about once a second, and `judge` when a parity check is complete.

        Time in which this process was stopped does not count. Re-raises the network thread's exception, or raises
        WaitTimeoutError saying what was waited for.
        """
        left = timeout_s
        while True:
            began = time.monotonic()
            with self._ledger.changed:
                self.check()
                if satisfied():
                    return
                if left <= 0:
                    raise WaitTimeoutError(f"waited {timeout_s:g} s for {what()}")
                judging = judge is not None and self.parity.has_complete
                if not judging:
                    self._ledger.changed.wait(min(left, _CHECK_EVERY_S))
            if judging and judge is not None:
                judge()
            # By the clock, over all waits: where groups arrive all the time no wait lasts as long.
            if time.monotonic() - self._told_at >= _CHECK_EVERY_S:
                progress()
                self._told_at = time.monotonic()
            left -= min(time.monotonic() - began, 2 * _CHECK_EVERY_S)

    def check(self) -> None:
        """Re-raise the thread's exception, if it has ended with one, or what ends the run."""
        if self.failure is not None:
            raise self.failure
        self._check_run()

    def stop(self, reason: str | None, *, run_is_finished: bool = False) -> None:
        """End the thread, and say goodbye to every server unless `reason` is None: then they wait for our return."""
        if self.is_alive:
            self.call_soon(self._begin_stop, reason, run_is_finished)
            self._thread.join(timeout=2 * PARTING_S)
        self._sockets.close()
        self._mailbox.close()
        self._context.term()  # returns when the goodbyes are on their way, or after the sockets' linger

    # --- the network thread's side --------------------------------------------------------------

    def _begin_stop(self, reason: str | None, run_is_finished: bool) -> None:
        self._stopping, self._goodbye, self._run_is_finished = True, reason, run_is_finished

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # raised again by the main thread's next wait, which then says goodbye
            logger.error("the network thread stops: %s", error)
            if isinstance(error, BadStateError | UserError):  # from a crash, a learner comes back
                self._goodbye = f"the learner failed: {error}"
            with self._ledger.changed:
                self.failure = error
                self._ledger.changed.notify_all()
        if self._goodbye is not None:
            self._part(self._goodbye)

    def _loop(self) -> None:
        poller = zmq.Poller()
        for socket in (self.control.socket, self.weights.socket, self._mailbox.wakeup):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            poller.poll(0 if self.tickets.is_busy else round(POLL_S * 1000))
            self._mailbox.run()
            self._receive_control()
            self.groups.keep()
            self._serve_weights()
            self.parity.work()
            self.evaluations.work()  # before the sender: when it has released a version, tickets of newer ones can go
            self.tickets.work()
            self.lease.offer()
            self.servers.keep_alive()

    def _part(self, reason: str) -> None:
        """Send goodbye and wait for replies: closing the socket at once could discard it."""
        self.servers.send_to_all(Goodbye(reason=reason, expected=self._run_is_finished))
        deadline = time.monotonic() + PARTING_S
        while self.servers.connected and time.monotonic() < deadline:
            self.control.socket.poll(round(POLL_S * 1000))
            for received in self.control.turn():
                if isinstance(received, Received) and isinstance(received.message, Goodbye):
                    self.servers.take_goodbye(received.identity, received.message)
        self.groups.forget()
        if self.servers.connected:
            logger.warning("no goodbye from %s within %g s", sorted(self.servers.connected), PARTING_S)

    def _receive_control(self) -> None:
        for received in self.control.turn():
            if isinstance(received, Muted):
                self.servers.expel(received)
            elif isinstance(received, BadMessage):
                self._take_bad_message(received)
            elif isinstance(received.message, Hello):
                self.servers.greet(received.identity, received.message)
            elif (server_id := self.servers.at(received.identity)) is not None:
                self._handle(server_id, received)
            else:
                self.control.send(received.identity, Error(code=ErrorCode.NOT_WELCOME, reason="say hello first"))

    def _take_bad_message(self, bad: BadMessage) -> None:
        """Count it; the ticket of a group that cannot be decoded goes back, since it would come again like this."""
        self.servers.errors[str(bad.error.code)] += 1
        logger.warning("a message could not be used: %s", bad.error)
        server_id = self.servers.at(bad.identity)
        if server_id is not None and bad.ticket_id is not None:
            reason = f"its group could not be decoded: {bad.error.reason}"
            failed = TicketFailed(ticket_id=bad.ticket_id, error_kind=str(bad.error.code), error_message=reason)
            self._give_back(server_id, failed)

    def _handle(self, server_id: str, received: Received) -> None:
        """Pass a welcomed server's message to the part that it concerns."""
        message, server = received.message, self.servers.connected[server_id]
        server.heard_at = time.monotonic()
        self._record_span(server_id, message)
        if isinstance(message, Goodbye):
            self.servers.take_goodbye(received.identity, message)
        elif server.refused:
            return
        elif isinstance(message, Group):
            if self.parity.awaits(server_id, message.ticket_id):
                self.parity.accept_group(server_id, message)
            elif self.parity.was_issued(message.ticket_id):
                self.servers.send(server_id, Ack(ticket_ids=(message.ticket_id,)))
            else:
                self.groups.accept(server_id, message, received.frames)
        elif isinstance(message, TicketFailed):
            self._take_failure(server_id, received.identity, message)
        elif isinstance(message, TicketReturned):
            self._take_return(server_id, received.identity, message)
        elif isinstance(message, ServerHeartbeat):
            self.servers.take_heartbeat(server_id, message)
        elif isinstance(message, WeightsLoaded):
            server.loaded = message
        elif isinstance(message, LeaseReturn):
            self.lease.take_return(server, message)
        elif isinstance(message, Error):
            self.servers.errors[str(message.code)] += 1
            logger.warning("%s answers %s: %s", server_id, message.code, message.reason)

    def _take_failure(self, server_id: str, identity: bytes, failed: TicketFailed) -> None:
        self.servers.count_error(failed.error_kind)
        logger.warning("ticket %d failed on %s: %s", failed.ticket_id, server_id, failed.error_message)
        if not self._give_back(server_id, failed):
            self.control.charge(identity)  # it held no such ticket

    def _take_return(self, server_id: str, identity: bytes, returned: TicketReturned) -> None:
        if self.parity.awaits(server_id, returned.ticket_id):
            return  # it leaves: its goodbye follows
        if self.groups.has(returned.ticket_id):
            self.groups.keep()
        if not self.servers.take_return(server_id, returned):
            self.control.charge(identity)  # it held no such ticket

    def _give_back(self, server_id: str, failed: TicketFailed) -> bool:
        """Take a ticket from a server that failed at it; False if it did not hold it."""
        if self.parity.awaits(server_id, failed.ticket_id):
            self.parity.fail_ticket(server_id, failed)
            return True
        if self.groups.has(failed.ticket_id):  # another server's group has just come: this one only owes it
            self.groups.keep()
        return self.servers.give_back(failed.ticket_id, server_id, f"{failed.error_kind}: {failed.error_message}")

    def _record_span(self, server_id: str, message: Message) -> None:
        """Record the durations that a server's message reports as spans of the timeline."""
        if isinstance(message, Group):
            timings = message.timings
            self.timeline.ended(server_id, "generating", timings.generate_s, ago_s=timings.reward_s)
            self.timeline.ended(server_id, "scoring", timings.reward_s)
        elif isinstance(message, WeightsLoaded):
            seconds = message.transfer_s + message.load_s
            self.timeline.ended(server_id, "loading", seconds, version=message.version)
        elif isinstance(message, LeaseReturn):
            self.timeline.ended(server_id, "falling asleep", message.sleep_s, wake_s=round(message.wake_s, 3))

    def _serve_weights(self) -> None:
        for received in self.weights.turn():
            if isinstance(received, Muted):
                self.servers.errors["muted"] += 1
                logger.warning("a reader of weights is muted: %s", received.reason)
            elif isinstance(received, BadMessage):
                self.servers.errors[str(received.error.code)] += 1
            elif isinstance(received.message, ChunkRequest):
                self._send_chunk(received.identity, received.message)
            elif isinstance(received.message, SourceRequest):
                self._name_source(received.identity, received.message)
            elif isinstance(received.message, TransferRequest):
                self._begin_transfer(received.identity, received.message)
            elif isinstance(received.message, TransferEnd) and self._device_sender is not None:
                self._device_sender.end(received.identity, received.message)

    def _send_chunk(self, identity: bytes, request: ChunkRequest) -> None:
        """Answer a request for bytes. A chunk that finds the reader's queue full is dropped: the reader asks again."""
        answer = answer_chunk_request(self.publication, request)
        if self.weights.send(identity, answer) is Delivery.SENT and isinstance(answer, Chunk):
            self.weights_sent_bytes += answer.data.nbytes

    def _name_source(self, identity: bytes, request: SourceRequest) -> None:
        if self._sources is not None:
            answer = self._sources.answer(request)
        else:
            reason = "this learner sends all weights itself"
            answer = Error(code=ErrorCode.WRONG_CHANNEL, reason=reason, version=request.version)
        self.weights.send(identity, answer)

    def _begin_transfer(self, identity: bytes, request: TransferRequest) -> None:
        if self._device_sender is not None:
            answer = self._device_sender.answer(identity, request)
        else:
            reason = f"this learner sends nothing over {request.channel}"
            answer = Error(code=ErrorCode.WRONG_CHANNEL, reason=reason, version=request.version)
        self.weights.send(identity, answer)
