"""The server's conversation with the learner: hello until welcomed, groups until acknowledged, a pulse throughout."""

from __future__ import annotations

import logging
import os
import time
import uuid
from typing import get_args

import zmq.asyncio

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from protocol.endpoints import host_id
from protocol.errors import ErrorCode
from protocol.gate import HandshakeRejected
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
from protocol.sockets import BadMessage, SendTimeout
from rollout_server.dialling import dial

logger = logging.getLogger(__name__)

HELLO_EVERY_S = 1.0
"""How often a hello is repeated until the learner answers."""


class LearnerLink:
    """One DEALER socket. `messages()` yields what concerns the service; the rest is handled here."""

    def __init__(self, config: RunConfig, server_id: str, *, engine: str, fingerprints: tuple[str, str]):
        self._config = config
        self._timeout_s = config.network.timeout_s
        self.server_id = server_id
        model, processor = fingerprints
        self._hello = Hello(
            server_id=server_id,
            session=uuid.uuid4().hex,
            host_id=host_id(),
            engine=engine,
            model_fingerprint=model,
            processor_fingerprint=processor,
            max_groups=config.groups_in_flight,
            pid=os.getpid(),
        )
        self._context = zmq.asyncio.Context()
        try:
            self.socket = dial(config, config.control_endpoint, get_args(ControlFromLearner), self._context)
        except UserError:
            self._context.term()
            raise
        self.unacknowledged: dict[int, Group] = {}
        self._heard_at = time.monotonic()

    @property
    def host_id(self) -> str:
        return self._hello.host_id

    async def connect(self) -> Welcome:
        """Say hello until the learner welcomes us. Raises UserError if it refuses or never answers."""
        deadline = time.monotonic() + self._config.network.start_timeout_s
        logger.info("saying hello to the learner at %s", self._config.control_endpoint)
        while time.monotonic() < deadline:
            try:
                await self.socket.send(self._hello, timeout_s=HELLO_EVERY_S)
            except SendTimeout:
                continue
            except HandshakeRejected as problem:
                raise UserError(str(problem)) from problem
            answer = await self.socket.recv(timeout_s=5 * HELLO_EVERY_S)
            if isinstance(answer, Refusal):
                raise UserError(f"the learner refuses this server: {answer.reason}. {answer.fix}")
            if isinstance(answer, Welcome):
                self._heard_at = time.monotonic()
                return answer
        raise UserError(
            f"no learner answered at {self._config.control_endpoint} within "
            f"{self._config.network.start_timeout_s:g} s (network.start_timeout_s). Is it running, with the same "
            "network.host and network.control_port?"
        )

    async def next_message(self) -> Message | None:
        """The next message for the service, or None. Raises BadStateError when the learner has gone silent."""
        message = await self.socket.recv(timeout_s=self._config.network.heartbeat_s)
        silent_s = time.monotonic() - self._heard_at
        if message is None:
            if silent_s > self._timeout_s:
                raise BadStateError(
                    f"the learner at {self._config.control_endpoint} has been silent for {silent_s:.0f} s "
                    f"(network.timeout_s = {self._timeout_s:g})"
                )
            return None
        self._heard_at = time.monotonic()
        if isinstance(message, BadMessage):
            logger.warning("a message from the learner could not be used: %s", message.error)
        elif isinstance(message, Ack):
            for ticket_id in message.ticket_ids:
                self.unacknowledged.pop(ticket_id, None)
        elif isinstance(message, Error):
            await self._handle_error(message)
        elif isinstance(message, Welcome):
            await self._resend()
        elif isinstance(message, Refusal):
            raise UserError(f"the learner refuses this server: {message.reason}. {message.fix}")
        elif not isinstance(message, LearnerHeartbeat):
            return message
        return None

    async def _handle_error(self, error: Error) -> None:
        if error.code is ErrorCode.NOT_WELCOME:
            logger.info("the learner does not know this connection; saying hello again")
            await self.send(self._hello)
        else:
            logger.warning("the learner answers %s: %s", error.code, error.reason)
            if error.ticket_id is not None:
                self.unacknowledged.pop(error.ticket_id, None)

    async def _resend(self) -> None:
        """After a reconnection: what was not acknowledged goes out again; the learner recognises duplicates."""
        for group in list(self.unacknowledged.values()):
            await self.send(group)

    async def send_group(self, group: Group) -> None:
        self.unacknowledged[group.ticket_id] = group
        await self.send(group)

    async def send(self, message: Wire) -> None:
        try:
            await self.socket.send(message, timeout_s=self._timeout_s)
        except SendTimeout as problem:
            logger.warning("%s; it is sent again after reconnection", problem)

    async def goodbye(self, reason: str, *, expected: bool, unfinished: tuple[int, ...]) -> None:
        try:
            await self.socket.send(
                Goodbye(reason=reason, expected=expected, unfinished_ticket_ids=unfinished), timeout_s=1.0
            )
        except SendTimeout:
            logger.info("the learner has gone before our goodbye")

    def close(self) -> None:
        self.socket.close()
        self._context.term()  # returns when the goodbye is on its way, or after the socket's linger
