"""Outstanding tickets: those whose groups have not arrived, and their servers.

The ledger adds and removes tickets. `learner/network/servers.py` decides which server holds one: it alone calls
`reconcile` and `give_back`, when a server connects, is lost or fails.

A ticket that is over its deadline goes to another server, too. The first group to arrive counts; the other server
then *owes* the ticket: it still works on it, and its group will be recognised as a duplicate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from asyncrl.errors import BadStateError
from learner.groups.ticket import PreparedTicket
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.messages import PartialRollout

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Failures of one ticket after which the run stops with the last reason, or an evaluation goes on without its row."""


@dataclass
class Outstanding:
    """A ticket whose group is awaited."""

    prepared: PreparedTicket
    holders: dict[str, float] = field(default_factory=dict)
    """Servers that have the ticket, and since when, in monotonic seconds; the first one first."""
    attempts: int = 0
    failed_on: set[str] = field(default_factory=set)
    issued_at: float = field(default_factory=time.monotonic)
    withheld_until: float = 0.0
    """Monotonic seconds until which a server that held the ticket before a restart may still return its group."""

    @property
    def deadline(self) -> int:
        """Last policy version that can train the group: its tokens are at least as new as the ticket."""
        return self.prepared.slot.version + self.prepared.slot.bound


class OutstandingTickets:
    """Thread-safe under the ledger's lock: a ticket leaves when its group is in the ledger."""

    def __init__(self, lock: threading.Condition, deadline: TicketDeadline):
        self.deadline = deadline
        self.reissued = 0
        """Tickets that were given to another server while one had them."""
        self.duplicates = 0
        """Groups of such tickets that came second."""
        self.returned = 0
        """Tickets that a server gave back with what it had sampled of them."""
        self.returned_tokens = 0
        """Sampled tokens that came back with such tickets, each counted at every return."""
        self._lock = lock
        self._entries: dict[int, Outstanding] = {}
        self._owed: dict[int, Outstanding] = {}
        """Tickets whose groups are here, and that other servers still have."""
        self._given_up: list[tuple[PreparedTicket, str]] = []
        """Evaluation tickets that have failed for good, and why."""
        self._answered_at: dict[str, float] = {}
        """Time at which a server last sent a group, or reported a failure of one."""

    def add(self, prepared: PreparedTicket, *, withheld_until: float = 0.0) -> None:
        with self._lock:
            self._entries[prepared.ticket.ticket_id] = Outstanding(prepared, withheld_until=withheld_until)

    def remove(self, ticket_id: int, server_id: str) -> None:
        """Take a ticket out whose group has come from this server; others that have it owe it."""
        with self._lock:
            entry = self._entries.pop(ticket_id)
            self._measure(entry, server_id)
            if entry.holders:
                self._owed[ticket_id] = entry

    def take_duplicate(self, ticket_id: int, server_id: str) -> None:
        """Note a server's group for a ticket that it may have owed."""
        with self._lock:
            entry = self._owed.get(ticket_id)
            if entry is not None and server_id in entry.holders:
                self.duplicates += 1
                self._measure(entry, server_id)
                self._forget_paid()

    def _measure(self, entry: Outstanding, server_id: str) -> None:
        """Take the ticket from a server that has done its part of it."""
        now = self._answered_at[server_id] = time.monotonic()
        since = self._release(entry, server_id)
        if since is not None:
            self.deadline.measure(entry.prepared.ticket.kind, now - since)

    def _release(self, entry: Outstanding, server_id: str) -> float | None:
        """Take the ticket from a server. Returns since when it had it."""
        return entry.holders.pop(server_id, None)

    def _forget_paid(self) -> None:
        self._owed = {ticket_id: entry for ticket_id, entry in self._owed.items() if entry.holders}

    def _all(self) -> Iterator[tuple[int, Outstanding]]:
        """Every ticket that a server may have."""
        yield from self._entries.items()
        yield from self._owed.items()

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
            return [e.prepared for e in entries if not e.holders and e.withheld_until <= now]

    @property
    def has_waiting(self) -> bool:
        """True if `waiting` has any."""
        with self._lock:
            now = time.monotonic()
            return any(not entry.holders and entry.withheld_until <= now for entry in self._entries.values())

    def overdue(self) -> list[PreparedTicket]:
        """Tickets that the newest of their servers has had for longer than the deadline, oldest first."""
        with self._lock:
            now, entries = time.monotonic(), [entry for _, entry in sorted(self._entries.items())]
            return [e.prepared for e in entries if e.holders and self._is_late(e, now - max(e.holders.values()))]

    def stalled(self) -> set[str]:
        """Servers that have a ticket over the deadline, and have answered nothing for as long."""
        with self._lock:
            now = time.monotonic()
            return {
                server_id
                for _, entry in self._all()
                for server_id, since in entry.holders.items()
                if self._is_late(entry, now - max(since, self._answered_at.get(server_id, since)))
            }

    def _is_late(self, entry: Outstanding, seconds: float) -> bool:
        return seconds > self.deadline.seconds(entry.prepared.ticket.kind)

    def forgive(self, seconds: float) -> None:
        """Extend all deadlines by a time in which this process was stalled."""
        with self._lock:
            for _, entry in self._all():
                entry.holders = {server_id: since + seconds for server_id, since in entry.holders.items()}
            self._answered_at = {server_id: at + seconds for server_id, at in self._answered_at.items()}

    def held_by(self, server_id: str) -> int:
        """Number of tickets that a server works on, owed ones included."""
        return sum(self.held_of_kind(server_id, is_training=is_training) for is_training in (True, False))

    def held_of_kind(self, server_id: str, *, is_training: bool) -> int:
        """Number of training, or of evaluation tickets that a server has: neither takes room from the other."""
        with self._lock:
            entries = (entry for _, entry in self._all() if entry.prepared.is_training is is_training)
            return sum(server_id in entry.holders for entry in entries)

    def held(self, *, is_training: bool) -> Counter[str]:
        """Number of training, or of evaluation tickets that each server has."""
        with self._lock:
            entries = (entry for _, entry in self._all() if entry.prepared.is_training is is_training)
            return Counter(server_id for entry in entries for server_id in entry.holders)

    def holds_since(self, server_id: str, moment: float) -> bool:
        """Whether a server has had one of its tickets since this monotonic time, or longer."""
        with self._lock:
            return any(entry.holders.get(server_id, inf) <= moment for _, entry in self._all())

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
                not entry.holders and entry.prepared.slot.version > version for entry in training
            )

    def assign(self, ticket_ids: Iterable[int], server_id: str) -> dict[int, str]:
        """Note that a server gets these tickets. Returns the servers that had some already, by ticket."""
        with self._lock:
            before: dict[int, str] = {}
            for ticket_id in ticket_ids:
                entry = self._entries[ticket_id]
                if entry.holders:
                    before[ticket_id] = ", ".join(entry.holders)
                entry.holders[server_id] = time.monotonic()
            self.reissued += len(before)
            return before

    def reconcile(self, server_id: str, held: Iterable[int] = ()) -> int:
        """Set the tickets held by a server (none once it is lost); requeue the others.

        Returns how many waiting tickets it has brought back, after a (re)connection.
        """
        with self._lock:
            ids, now, brought = set(held), time.monotonic(), 0
            for ticket_id, entry in self._all():
                if ticket_id not in ids:
                    self._release(entry, server_id)
                elif server_id not in entry.holders:
                    brought += not entry.holders
                    entry.holders[server_id] = now
            self._forget_paid()
            if not ids:
                self._answered_at.pop(server_id, None)
            return brought

    def give_back(self, ticket_id: int, server_id: str, reason: str, servers: Collection[str]) -> bool:
        """Take a ticket from a server that failed at it; False, and nothing else, if it does not hold it.

        After MAX_ATTEMPTS, once all `servers` that could try have failed at it, an evaluation ticket is given up; for a
        training ticket, which the run cannot do without, raises BadStateError.
        """
        with self._lock:
            entry = self._entries.get(ticket_id) or self._owed.get(ticket_id)
            if entry is None or server_id not in entry.holders:
                return False
            self._release(entry, server_id)
            self._answered_at[server_id] = time.monotonic()
            if ticket_id in self._owed:
                self._forget_paid()
                return True
            entry.failed_on.add(server_id)
            entry.attempts += 1
            entry.prepared = entry.prepared.anew()  # what another has begun may be at fault
            if entry.attempts >= MAX_ATTEMPTS and not entry.holders and entry.failed_on.issuperset(servers):
                row = entry.prepared.ticket.prompt.row_id
                failed = f"ticket {ticket_id} (row {row}) failed {entry.attempts} times: {reason}"
                if entry.prepared.is_training:
                    raise BadStateError(f"{failed}. See the logs of the rollout servers")
                del self._entries[ticket_id]
                self._given_up.append((entry.prepared, failed))
            return True

    def take_return(self, ticket_id: int, server_id: str, partial: PartialRollout) -> bool:
        """Keep what a server has sampled of a ticket that it gives back. Returns False if it does not hold the ticket.

        On-policy a ticket begins anew: a batch is sampled whole, to the last bit. Raises ValueError where the columns
        do not fit the ticket.
        """
        with self._lock:
            entry = self._entries.get(ticket_id) or self._owed.get(ticket_id)
            if entry is None or server_id not in entry.holders:
                return False
            if ticket_id in self._entries and (entry.prepared.slot.bound or not entry.prepared.is_training):
                before = entry.prepared.ticket.partial
                entry.prepared = entry.prepared.going_on(before.joined(partial) if before else partial)
                logger.info("ticket %d comes back from %s with %d tokens", ticket_id, server_id, partial.token_ids.size)
                self.returned += 1
                self.returned_tokens += partial.token_ids.size
            self._release(entry, server_id)
            self._answered_at[server_id] = time.monotonic()
            self._forget_paid()
            return True

    def take_given_up(self) -> list[tuple[PreparedTicket, str]]:
        """Evaluation tickets that have been given up since the last call, each with the reason."""
        with self._lock:
            given_up, self._given_up = self._given_up, []
            return given_up

    def may_try(self, ticket_id: int, server_id: str, servers: Collection[str]) -> bool:
        """True if this server does not have the ticket, and has not failed at it or all `servers` have."""
        with self._lock:
            entry = self._entries[ticket_id]
            may_again = server_id not in entry.failed_on or entry.failed_on.issuperset(servers)
            return server_id not in entry.holders and may_again
