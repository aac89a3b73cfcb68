"""Tickets that a server works on: begun, answered, and given back where the server is asked to end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from asyncrl.config.service_sections import RolloutConfig
from protocol.errors import ProtocolError
from protocol.faults import crash_point
from protocol.messages import Group, Ticket, TicketFailed, Tickets
from rollout_server.engines.base import EngineDied
from rollout_server.exporter import ServerExporter
from rollout_server.link import LearnerLink
from rollout_server.production.group_producer import (
    Answer,
    GroupProducer,
    check_sampling,
    ticket_as_it_came,
    ticket_failed,
)
from rollout_server.weights.policy_versions import PolicyVersions

logger = logging.getLogger(__name__)
DRAINING_S = 10.0
"""Longest time in which a server that is asked to end gives its tickets back: a spot machine has 30 s."""


@dataclass
class TicketsInWork:
    """Tickets by id. Tasks that produce their groups run in `task_group` until the learner says goodbye."""

    rollout: RolloutConfig
    link: LearnerLink
    exporter: ServerExporter
    policy_versions: PolicyVersions
    producer: GroupProducer
    task_group: asyncio.TaskGroup
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    held: dict[int, Ticket] = field(default_factory=dict)
    """Tickets by id, until they are answered."""
    _not_begun: set[int] = field(default_factory=set)
    """Tickets that wait for weights."""
    _drains: bool = False
    """True once the server was asked to end: nothing is begun any more."""

    def begin(self, message: Tickets) -> None:
        """Start what is new; after a reconnection the learner may send tickets that are in work or sent already."""
        new = tuple(
            ticket
            for ticket in message.tickets
            if ticket.ticket_id not in self.held and ticket.ticket_id not in self.link.unacknowledged
        )
        if not new or self._drains:
            return
        self.held |= {ticket.ticket_id: ticket for ticket in new}
        task = self.task_group.create_task(self._produce(message.model_copy(update={"tickets": new})))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _produce(self, message: Tickets) -> None:
        """Produce the groups of one message. A fault that is no single ticket's fails all that are unanswered."""

        def unanswered() -> list[Ticket]:  # one that was given back may be here again, by another message
            return [ticket for ticket in message.tickets if self.held.get(ticket.ticket_id) is ticket]

        self._not_begun |= {ticket.ticket_id for ticket in message.tickets}
        try:
            check_sampling(message.tickets, self.rollout)
            async with self.policy_versions.at_least(max(ticket.begins_at for ticket in message.tickets)):
                crash_point("ticket.started")
                begins = {ticket.ticket_id: ticket for ticket in unanswered()}
                self._not_begun -= begins.keys()
                async for answer in self.producer.produce(tuple(begins.values()), message.blobs):
                    await self._answer(begins[answer.ticket_id], answer)
        except EngineDied:
            raise  # they stay in work: our goodbye gives them back, and it is not counted against them
        except Exception as error:
            failed = unanswered()
            logger.exception("tickets %s failed", sorted(ticket.ticket_id for ticket in failed))
            for ticket in failed:
                await self._answer(ticket, ticket_failed(ticket, error))

    async def _answer(self, ticket: Ticket, answer: Answer) -> None:
        """Send the group of a ticket, or what there is of it, or say why there is none."""
        if isinstance(answer, Group):
            try:
                await self.link.send_group(answer)
                self.exporter.produced(answer)
            except ProtocolError as error:  # it is too large to travel, or has odd values
                logger.exception("ticket %d (row %s) failed", ticket.ticket_id, ticket.prompt.row_id)
                answer = ticket_failed(ticket, error)
        self.held.pop(ticket.ticket_id, None)
        self._not_begun.discard(ticket.ticket_id)
        if isinstance(answer, TicketFailed):
            self.exporter.ticket_failed(answer.error_kind)
        if not isinstance(answer, Group):
            crash_point("ticket.returning")
            await self.link.send(answer)

    async def drain(self) -> None:
        """Give back all that is in work, as it is, for others to go on with; what is complete is scored and sent.

        Conversations, whose environments stay here, are issued again.
        """
        self._drains = True
        movable = {ticket_id for ticket_id, ticket in self.held.items() if not ticket.conversation}
        if not movable:
            return
        logger.info("ending: %d tickets go back to the learner as they are", len(movable))
        try:
            async with asyncio.timeout(DRAINING_S):
                await self._interrupt(movable)
                while movable & self.held.keys():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logger.warning("%d tickets did not come to an end in %g s", len(movable & self.held.keys()), DRAINING_S)

    async def _interrupt(self, movable: set[int]) -> None:
        """Give these tickets back: what has not begun as it came, the rest as it is by now."""
        while waiting := self._not_begun.intersection(movable):  # each answer takes time, in which others may begin
            ticket = self.held[waiting.pop()]
            await self._answer(ticket, ticket_as_it_came(ticket))
        await self.producer.interrupt(movable)
