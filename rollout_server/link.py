"""Connection to the learner: hello until welcomed, resending groups until acknowledged, silence of the learner."""

from __future__ import annotations

import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import zmq.asyncio

from asyncrl.config.part_settings import LinkSettings
from asyncrl.config.run_sections import NetworkConfig
from asyncrl.errors import BadStateError, UserError, WaitTimeoutError
from asyncrl.run_folder.lock import is_starting
from protocol.codec import MIB, Expected, Limits
from protocol.curve import HandshakeRejected, KeyFileError, read_server_keys
from protocol.endpoints import BindError, host_id
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import (
    Ack,
    ControlFromLearner,
    Error,
    Goodbye,
    Group,
    Hello,
    LearnerHeartbeat,
    Message,
    Refusal,
    Welcome,
    Wire,
)
from protocol.sockets import SLOWEST_TURN_S, BadMessage, SendTimeout, ServerSocket, Stalls

logger = logging.getLogger(__name__)
OVER = "the run is finished: its directory says so"
HELLO_EVERY_S = 1.0
"""Interval at which a hello is repeated until the learner answers."""


def dial(
    network: NetworkConfig, endpoint: str, expected: Expected, context: zmq.asyncio.Context | None = None
) -> ServerSocket:
    """Connect to one of the learner's endpoints. Raises UserError naming the setting to change."""
    try:
        return ServerSocket(
            endpoint,
            expected,
            Limits(max_message_bytes=network.max_message_mib * MIB),
            keys=read_server_keys(Path(network.keys_dir)) if network.keys_dir else None,
            insecure=network.insecure,
            context=context,
        )
    except (BindError, KeyFileError) as error:
        raise UserError(str(error)) from error


@dataclass
class SentGroup:
    """A group that the learner has not acknowledged."""

    group: Group
    sent_at: float
    """Monotonic seconds of the last attempt."""


class LearnerLink:
    """One DEALER socket. `next_message` yields what concerns the service; the rest is handled here.

    `in_work` names the tickets that the service works on.
    """

    def __init__(
        self,
        settings: LinkSettings,
        *,
        engine: str,
        fingerprints: tuple[str, str],
        in_work: Callable[[], Iterable[int]],
        is_over: Callable[[], bool] = lambda: False,
        base_fingerprint: str = "",
        scoring: tuple[tuple[str, str], ...] = (),
    ):
        self._settings = settings
        self._timeout_s = settings.network.timeout_s
        self._in_work = in_work
        self._is_over = is_over
        model, processor = fingerprints
        self.session = session = uuid.uuid4().hex
        # Unique for ever: after a crash the learner may still believe in the process before us.
        self.server_id = f"{platform.node()}-{os.getpid()}-{session[:6]}"
        self._hello = Hello(
            server_id=self.server_id,
            session=session,
            host_id=host_id(),
            engine=engine,
            model_fingerprint=model,
            processor_fingerprint=processor,
            base_fingerprint=base_fingerprint,
            scoring=scoring,
            quantization=settings.quantization,
            max_groups=settings.groups_in_flight,
            pid=os.getpid(),
            mode=settings.mode,
        )
        self._context = zmq.asyncio.Context()
        try:
            self.socket = dial(
                settings.network, settings.network.control_endpoint, get_args(ControlFromLearner), self._context
            )
        except UserError:
            self._context.term()
            raise
        self.unacknowledged: dict[int, SentGroup] = {}
        self._stalls = Stalls(settings.network.heartbeat_s + SLOWEST_TURN_S)
        self.heard_at = time.monotonic()
        """Time of the learner's last message, in monotonic seconds."""
        self.learner_is_silent = False
        """True when the learner has been silent for longer than network.timeout_s."""
        self.host_id = self._hello.host_id
        self._run_id: str | None = None

    async def connect(self, on_hello: Callable[[], object] = lambda: None) -> Welcome | None:
        """Say hello until the learner welcomes us, or the run is over (None). Raises UserError if it refuses,
        WaitTimeoutError if it never answers: it may still come. `on_hello` is called with every attempt.

        A learner that looks at its rows, or loads its model, is waited for as long as that takes: it ends by an answer
        or with its process.
        """
        deadline = time.monotonic() + self._settings.start_timeout_s
        logger.info("saying hello to the learner at %s", self._settings.network.control_endpoint)
        while time.monotonic() < deadline or is_starting(self._settings.run_path):
            if time.monotonic() >= deadline:
                deadline = time.monotonic() + self._settings.start_timeout_s
                logger.info("the learner is starting (it looks at its rows, or loads its model): waiting on")
            if self._is_over():
                logger.info(OVER)
                return None
            on_hello()
            try:
                await self.socket.send(self._current_hello(), timeout_s=HELLO_EVERY_S)
                answer = await self.socket.recv(timeout_s=3 * HELLO_EVERY_S)
                if answer is None:  # between two handshakes that fail there is a moment in which a hello can be sent
                    self.socket.check_handshakes()
            except SendTimeout:
                continue
            except HandshakeRejected as problem:
                raise UserError(str(problem)) from problem
            if isinstance(answer, Refusal):
                raise UserError(f"the learner refuses this server: {answer.reason}. {answer.fix}")
            if isinstance(answer, Welcome):
                self.heard_at = self._stalls.looked_at = time.monotonic()
                self._run_id = answer.run_id
                return answer
        raise WaitTimeoutError(
            f"no learner answered at {self._settings.network.control_endpoint} within "
            f"{self._settings.start_timeout_s:g} s (network.start_timeout_s). Is it running, with the same "
            "network.host and network.control_port?"
        )

    def _current_hello(self) -> Hello:
        held = sorted({*self._in_work(), *self.unacknowledged})
        return self._hello.model_copy(update={"held_ticket_ids": tuple(held)})

    async def next_message(self) -> Message | None:
        """The next message for the service, or None. A `Welcome` among them is that of a reconnection.

        Raises BadStateError when the learner has been gone for network.reconnect_timeout_s, or serves another run.
        """
        message = await self.socket.recv(timeout_s=self._settings.network.heartbeat_s)
        self._forgive_own_silence()
        if message is None:
            silent_s = time.monotonic() - self.heard_at
            if silent_s > self._timeout_s and self._is_over():
                return Goodbye(reason=OVER)
            self._check_silence(silent_s)
            return None
        self.heard_at = time.monotonic()
        if self.learner_is_silent:
            logger.info("the learner is back")
            self.learner_is_silent = False
        if isinstance(message, BadMessage):
            logger.warning("a message from the learner could not be used: %s", message.error)
        elif isinstance(message, Ack):
            for ticket_id in message.ticket_ids:
                self.unacknowledged.pop(ticket_id, None)
                logger.debug("ticket %d is acknowledged", ticket_id)
        elif isinstance(message, Error):
            await self._handle_error(message)
        elif isinstance(message, Welcome):
            if message.run_id != self._run_id:
                raise BadStateError(
                    f"the learner at {self._settings.network.control_endpoint} now makes run {message.run_id}; "
                    f"this server worked for run {self._run_id}. Start it again for the new run"
                )
            for sent in list(self.unacknowledged.values()):
                await self._send_again(sent)
            return message
        elif isinstance(message, Refusal):
            raise UserError(f"the learner refuses this server: {message.reason}. {message.fix}")
        elif not isinstance(message, LearnerHeartbeat):
            return message
        return None

    async def _handle_error(self, error: Error) -> None:
        if error.code is ErrorCode.NOT_WELCOME:
            logger.info("the learner does not know this connection; saying hello again")
            await self.send(self._current_hello())
        else:
            logger.warning("the learner answers %s: %s", error.code, error.reason)
            if error.ticket_id is not None:
                self.unacknowledged.pop(error.ticket_id, None)

    def _forgive_own_silence(self) -> None:
        """Do not count a stall of this process as the learner's silence: its messages are still unread."""
        if stalled_s := self._stalls.look(time.monotonic()):
            logger.warning("this server was suspended or blocked for %.0f s", stalled_s)
            self.heard_at += stalled_s

    def _check_silence(self, silent_s: float) -> None:
        limit_s = self._settings.network.reconnect_timeout_s
        if silent_s > limit_s:
            raise WaitTimeoutError(
                f"the learner at {self._settings.network.control_endpoint} has been gone for {silent_s:.0f} s "
                f"(network.reconnect_timeout_s = {limit_s:g})"
            )
        if silent_s > self._timeout_s and not self.learner_is_silent:
            self.learner_is_silent = True
            logger.warning(
                "the learner has been silent for %.0f s; continuing with queued tickets, for %g s at most",
                silent_s,
                limit_s,
            )

    async def resend_overdue(self) -> None:
        """Send groups again that have waited for their acknowledgement for longer than network.timeout_s."""
        now = time.monotonic()
        for sent in list(self.unacknowledged.values()):
            if now - sent.sent_at > self._timeout_s:
                logger.warning("ticket %d has not been acknowledged; sending its group again", sent.group.ticket_id)
                await self._send_again(sent)

    async def _send_again(self, sent: SentGroup) -> None:
        """Send a group once more; the learner recognises duplicates."""
        sent.sent_at = time.monotonic()
        await self.send(sent.group)

    async def send_group(self, group: Group) -> None:
        crash_point("group.sending")
        self.unacknowledged[group.ticket_id] = SentGroup(group, time.monotonic())
        try:
            await self.send(group)
        except ProtocolError:
            del self.unacknowledged[group.ticket_id]  # it can never travel: its ticket fails
            raise
        crash_point("group.sent")

    async def send(self, message: Wire) -> None:
        try:
            await self.socket.send(message, timeout_s=self._timeout_s)
        except SendTimeout as problem:
            logger.warning("%s; it is sent again after reconnection", problem)

    async def goodbye(self, reason: str, *, expected: bool) -> None:
        try:
            await self.socket.send(Goodbye(reason=reason, expected=expected), timeout_s=1.0)
        except SendTimeout:
            logger.info("the learner has gone before our goodbye")

    def close(self) -> None:
        self.socket.close()
        self._context.term()  # returns when the goodbye is on its way, or after the socket's linger
