"""The group receiver: groups that arrive are verified, journaled and acknowledged, in this order."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.environments.recording import EnvironmentHealth
from learner.groups.group_verification import verify_answer
from learner.groups.ticket import ReceivedGroup
from learner.network.servers import Servers
from learner.network.sockets import LearnerSockets
from learner.tickets.ledger import TicketLedger
from protocol.codec import Frame
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import Ack, Error, Group

logger = logging.getLogger(__name__)


@dataclass
class GroupReceiver:
    """Verifies each group when it comes; `keep` journals and acknowledges all groups of an iteration at once."""

    servers: Servers
    sockets: LearnerSockets
    ledger: TicketLedger
    verify: Callable[..., None]
    """`verify_group` with those arguments that are the same for the whole run."""
    on_kept: Callable[[np.ndarray], None] = lambda lags_s: None
    """Called with the seconds from verification to acknowledgement of the groups of an iteration."""
    health: EnvironmentHealth = field(default_factory=EnvironmentHealth)
    _arrived: dict[int, tuple[list[str], ReceivedGroup]] = field(default_factory=dict)
    """Groups of this iteration, each with the servers that sent it; the first one's counts."""

    def accept(self, server_id: str, group: Group, frames: Sequence[Frame]) -> None:
        """Verify a group; `frames` are the group as it travelled."""
        if group.ticket_id in self._arrived:
            senders, _ = self._arrived[group.ticket_id]
            if server_id not in senders:
                senders.append(server_id)
            return
        prepared = self.ledger.out.get(group.ticket_id)
        if prepared is None:
            self._answer_unawaited(server_id, group.ticket_id)
            return
        try:
            now = self.servers.version
            verify_answer(self.verify, group, prepared, sender=server_id, version=now, bridge=prepared.bridge)
        except ProtocolError as error:
            self._refuse(server_id, group, error)
            return
        crash_point("group.verified")
        self._arrived[group.ticket_id] = ([server_id], ReceivedGroup(prepared, group, frames))

    def _refuse(self, server_id: str, group: Group, error: ProtocolError) -> None:
        self.servers.errors[str(error.code)] += 1
        logger.warning("group of ticket %d refused: %s", group.ticket_id, error.reason)
        self.sockets.control.charge(self.servers.connected[server_id].identity)
        self.servers.give_back(group.ticket_id, server_id, error.reason)
        self.servers.send(server_id, Error(code=error.code, reason=error.reason, ticket_id=group.ticket_id))

    def _answer_unawaited(self, server_id: str, ticket_id: int) -> None:
        """Acknowledge a duplicate again; a ticket that was never issued is another run's, or garbage."""
        if self.ledger.was_issued(ticket_id):
            self.ledger.out.take_duplicate(ticket_id, server_id)
            self.servers.send(server_id, Ack(ticket_ids=(ticket_id,)))
            return
        self.servers.errors[str(ErrorCode.UNKNOWN_TICKET)] += 1
        reason = f"this run has not issued ticket {ticket_id}"
        self.servers.send(server_id, Error(code=ErrorCode.UNKNOWN_TICKET, reason=reason, ticket_id=ticket_id))

    def has(self, ticket_id: int) -> bool:
        """Whether this ticket's group was verified in this iteration."""
        return ticket_id in self._arrived

    def keep(self) -> None:
        """Journal the groups of this iteration, and then acknowledge them.

        Raises BadStateError, after that, where most trajectories are lost to a failing environment.
        """
        if not self._arrived:
            return
        self.ledger.receive([received for _, received in self._arrived.values()])
        crash_point("group.journaled")
        owners: dict[str, list[int]] = defaultdict(list)
        for ticket_id, (senders, _) in self._arrived.items():
            for server_id in senders:
                owners[server_id].append(ticket_id)
                self.ledger.out.take_duplicate(ticket_id, server_id)
        arrived_at = np.asarray([received.arrived_at for _, received in self._arrived.values()])
        records = [record for _, received in self._arrived.values() for record in received.group.trajectories]
        self._arrived.clear()
        for server_id, ticket_ids in owners.items():
            if server_id in self.servers.connected:  # one that has left asks again when it is back
                self.servers.send(server_id, Ack(ticket_ids=tuple(ticket_ids)))
                crash_point("group.acknowledged")
        self.on_kept(time.monotonic() - arrived_at)
        self.health.observe(records)

    def forget(self) -> None:
        """Drop verified groups without acknowledgement: their servers keep them for the next learner."""
        self._arrived.clear()
