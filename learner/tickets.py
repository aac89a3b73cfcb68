"""The ticket ledger: bounded staleness by admission, back-pressure, and an account of every group.

A ticket is *waiting* (issued, with no server), *in flight* (with a server), *buffered* (its group is here) or
*trained*; at every instant `issued = waiting + in_flight + buffered + trained`.

Admission: before version v, at most `(max_staleness + v + 1) * prompts_per_step` tickets have been issued. A ticket
issued at version w may be sampled by version w or newer, so it stays trainable up to version `w + max_staleness`.
The learner never moves past that version while the ticket is out (`on_stale: wait`): `blockers` names what it waits
for, and `take` returns the oldest groups first. Nothing is dropped, and nothing is trained too late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import BadStateError
from learner.batch import ReceivedGroup
from protocol.messages import Ticket

MAX_ATTEMPTS = 3
"""Failures of one ticket after which the run stops with the last reason."""


@dataclass
class _Entry:
    ticket: Ticket
    server_id: str | None = None
    attempts: int = 0
    issued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class LedgerCounts:
    issued: int
    waiting: int
    in_flight: int
    buffered: int
    trained: int

    @property
    def residual(self) -> int:
        """0, always; anything else is a lost or doubled group."""
        return self.issued - self.waiting - self.in_flight - self.buffered - self.trained


class TicketLedger:
    """Thread-safe. `changed` is notified whenever a group arrives or the exchange fails."""

    def __init__(self, *, prompts_per_step: int, max_staleness: int, total_groups: int):
        self._per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._total = total_groups
        self._out: dict[int, _Entry] = {}
        self._buffer: dict[int, ReceivedGroup] = {}
        self._issued = 0
        self._trained = 0
        self._next_id = 0
        self._reissue: list[int] = []
        self.changed = threading.Condition()

    # --- issuing ------------------------------------------------------------------------------

    def issue(self, version: int, write: Callable[[int], Ticket]) -> list[Ticket]:
        """Issue every ticket that admission allows before `version`; `write` makes the ticket of an id."""
        with self.changed:
            limit = min((self._max_staleness + version + 1) * self._per_step, self._total)
            ids = self._reissue + list(range(self._next_id, self._next_id + max(limit - self._next_id, 0)))
            tickets = [write(ticket_id) for ticket_id in ids]
            for ticket in tickets:
                self._out[ticket.ticket_id] = _Entry(ticket)
            self._issued += len(tickets)
            self._next_id = max(self._next_id, limit)
            self._reissue = []
            return tickets

    def waiting(self) -> list[Ticket]:
        """Tickets with no server, oldest first."""
        with self.changed:
            return [e.ticket for _, e in sorted(self._out.items()) if e.server_id is None]

    def assign(self, ticket_ids: Sequence[int], server_id: str) -> None:
        with self.changed:
            for ticket_id in ticket_ids:
                self._out[ticket_id].server_id = server_id

    def held_by(self, server_id: str) -> int:
        with self.changed:
            return sum(entry.server_id == server_id for entry in self._out.values())

    # --- coming back ----------------------------------------------------------------------------

    def ticket(self, ticket_id: int) -> Ticket | None:
        """The ticket if its group is still awaited."""
        with self.changed:
            entry = self._out.get(ticket_id)
            return entry.ticket if entry else None

    def receive(self, received: ReceivedGroup) -> None:
        """Buffer a verified group. Its ticket must still be out."""
        with self.changed:
            del self._out[received.ticket.ticket_id]
            self._buffer[received.ticket.ticket_id] = received
            self.changed.notify_all()

    def is_known(self, ticket_id: int) -> bool:
        """Was it ever issued? A group for a known ticket that is no longer out is a duplicate."""
        with self.changed:
            return ticket_id < self._next_id and ticket_id not in self._reissue

    def give_back(self, ticket_id: int, reason: str) -> None:
        """A server failed at it; another attempt, but not for ever."""
        with self.changed:
            entry = self._out.get(ticket_id)
            if entry is None:
                return
            entry.server_id = None
            entry.attempts += 1
            if entry.attempts >= MAX_ATTEMPTS:
                raise BadStateError(
                    f"ticket {ticket_id} (row {entry.ticket.prompt.row_id}) failed {entry.attempts} times: {reason}"
                )

    def lose_server(self, server_id: str) -> int:
        """Its tickets wait for another server. Returns how many."""
        with self.changed:
            lost = [entry for entry in self._out.values() if entry.server_id == server_id]
            for entry in lost:
                entry.server_id = None
            return len(lost)

    # --- consuming ------------------------------------------------------------------------------

    def ready(self, version: int) -> bool:
        """Can a step be made at `version` without leaving a ticket behind that would become stale?"""
        with self.changed:
            return len(self._buffer) >= self._per_step and not self._blockers(version)

    def blockers(self, version: int) -> list[tuple[int, str | None, float]]:
        """What a step at `version` waits for: ticket id, server that holds it, seconds since it was issued."""
        with self.changed:
            now = time.monotonic()
            late = self._blockers(version) or sorted(self._out)
            return [(i, self._out[i].server_id, now - self._out[i].issued_at) for i in late]

    def _blockers(self, version: int) -> list[int]:
        last_chance = version - self._max_staleness
        return sorted(i for i, entry in self._out.items() if entry.ticket.min_version <= last_chance)

    def take(self, version: int) -> list[ReceivedGroup]:
        """The oldest `prompts_per_step` groups, in ticket order; they count as trained.

        Raises BadStateError if one of their tokens is older than the bound: admission must have prevented it.
        """
        with self.changed:
            assert self.ready(version), "take() before ready()"
            ids = sorted(self._buffer)[: self._per_step]
            taken = [self._buffer[i] for i in ids]
            for received in taken:
                oldest = int(received.group.versions.min()) if received.group.versions.size else version
                if version - oldest > self._max_staleness:
                    raise BadStateError(
                        f"ticket {received.ticket.ticket_id} has a token of version {oldest} at version {version}: "
                        f"over max_staleness {self._max_staleness}"
                    )
            for i in ids:
                del self._buffer[i]
            self._trained += len(taken)
            return taken

    # --- account and checkpoint -------------------------------------------------------------------

    def counts(self) -> LedgerCounts:
        with self.changed:
            waiting = sum(entry.server_id is None for entry in self._out.values())
            return LedgerCounts(
                issued=self._issued,
                waiting=waiting,
                in_flight=len(self._out) - waiting,
                buffered=len(self._buffer),
                trained=self._trained,
            )

    def state(self) -> dict[str, object]:
        """For the checkpoint: which data has been trained, and which of the issued has not."""
        with self.changed:
            return {
                "next_id": self._next_id,
                "trained": self._trained,
                "unfinished": sorted([*self._out, *self._buffer, *self._reissue]),
            }

    def restore(self, state: dict[str, object]) -> None:
        """Continue the account; unfinished tickets are issued again, with the same ids and seeds."""
        next_id, trained, unfinished = state["next_id"], state["trained"], state["unfinished"]
        assert isinstance(next_id, int) and isinstance(trained, int) and isinstance(unfinished, list)
        with self.changed:
            self._next_id, self._trained, self._issued = next_id, trained, trained
            self._reissue = list(unfinished)
