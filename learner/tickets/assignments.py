"""Outstanding tickets: those whose groups have not arrived, and their servers.

The ledger adds and removes tickets. `learner/network/servers.py` decides which server holds one: it alone calls
`reconcile` and `give_back`, when a server connects, is lost or fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from asyncrl.errors import BadStateError
from learner.tickets.ticket import PreparedTicket

MAX_ATTEMPTS = 3
"""Failures of one ticket after which the run stops with the last reason."""


@dataclass
class Outstanding:
    """A ticket whose group is awaited."""

    prepared: PreparedTicket
    server_id: str | None = None
    attempts: int = 0
    failed_on: set[str] = field(default_factory=set)
    issued_at: float = field(default_factory=time.monotonic)
    withheld_until: float = 0.0
    """Until then a server that held the ticket before the learner restarted may come back with it."""

    @property
    def deadline(self) -> int:
        """Last policy version that can train the group: its tokens are at least as new as the ticket."""
        return self.prepared.slot.version + self.prepared.slot.bound


class OutstandingTickets:
    """Thread-safe under the ledger's lock: a ticket leaves when its group is in the ledger."""

    def __init__(self, lock: threading.Condition):
        self._lock = lock
        self._entries: dict[int, Outstanding] = {}

    def add(self, prepared: PreparedTicket, *, withheld_until: float = 0.0) -> None:
        with self._lock:
            self._entries[prepared.ticket.ticket_id] = Outstanding(prepared, withheld_until=withheld_until)

    def remove(self, ticket_id: int) -> None:
        with self._lock:
            del self._entries[ticket_id]

    def get(self, ticket_id: int) -> PreparedTicket | None:
        """The ticket if its group is still awaited."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            return entry.prepared if entry else None

    def training(self) -> dict[int, Outstanding]:
        """The training tickets, by id."""
        with self._lock:
            return {i: entry for i, entry in self._entries.items() if entry.prepared.is_training}

    def waiting(self) -> list[PreparedTicket]:
        """Tickets with no server, oldest first."""
        with self._lock:
            now, entries = time.monotonic(), [entry for _, entry in sorted(self._entries.items())]
            return [e.prepared for e in entries if e.server_id is None and e.withheld_until <= now]

    def held_by(self, server_id: str) -> int:
        """Number of all tickets that a server has."""
        return sum(self.held_of_kind(server_id, is_training=is_training) for is_training in (True, False))

    def held_of_kind(self, server_id: str, *, is_training: bool) -> int:
        """Number of training, or of evaluation tickets that a server has: neither takes room from the other."""
        with self._lock:
            entries = (e for e in self._entries.values() if e.prepared.is_training is is_training)
            return sum(entry.server_id == server_id for entry in entries)

    @property
    def num_evaluation(self) -> int:
        """Number of evaluation tickets, with a server or without."""
        with self._lock:
            return len(self._entries) - len(self.training())

    def await_version(self, version: int) -> bool:
        """True if training tickets are out, and all of them wait for a server that has a version after `version`."""
        with self._lock:
            training = self.training().values()
            return bool(training) and all(
                entry.server_id is None and entry.prepared.slot.version > version for entry in training
            )

    def assign(self, ticket_ids: Iterable[int], server_id: str) -> None:
        with self._lock:
            for ticket_id in ticket_ids:
                self._entries[ticket_id].server_id = server_id

    def reconcile(self, server_id: str, held: Iterable[int] = ()) -> int:
        """Set the tickets held by a server (none once it is lost); requeue the others.

        Returns how many waiting tickets it has brought back, after a (re)connection.
        """
        with self._lock:
            ids = set(held)
            for ticket_id, entry in self._entries.items():
                if entry.server_id == server_id and ticket_id not in ids:
                    entry.server_id = None
            brought = [i for i in ids if i in self._entries and self._entries[i].server_id is None]
            self.assign(brought, server_id)
            return len(brought)

    def give_back(self, ticket_id: int, server_id: str, reason: str, servers: Collection[str]) -> bool:
        """Requeue a ticket after this server failed at it; False, and nothing else, if it does not hold it.

        Raises BadStateError after MAX_ATTEMPTS, once all connected `servers` have failed at it.
        """
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.server_id != server_id:
                return False
            entry.failed_on.add(server_id)
            entry.server_id = None
            entry.attempts += 1
            if entry.attempts >= MAX_ATTEMPTS and entry.failed_on.issuperset(servers):
                row = entry.prepared.ticket.prompt.row_id
                raise BadStateError(
                    f"ticket {ticket_id} (row {row}) failed {entry.attempts} times: {reason}. "
                    "See the logs of the rollout servers"
                )
            return True

    def may_try(self, ticket_id: int, server_id: str, servers: Collection[str]) -> bool:
        """True if this server has not failed at the ticket, or all `servers` have."""
        with self._lock:
            failed_on = self._entries[ticket_id].failed_on
            return server_id not in failed_on or failed_on.issuperset(servers)
