"""The ticket ledger: bounded staleness by admission, back-pressure, and an account of every group.

A training ticket is *waiting* (issued, with no server), *in flight* (with a server), *buffered* (its group is here)
or *trained*; at every instant `issued = waiting + in_flight + buffered + trained`. Evaluation tickets travel the
same way and are counted apart.

Admission: before version v, at most `(max_staleness + v + 1) * prompts_per_step` tickets have been issued. A ticket
issued at version w is sampled by version w or newer, so it stays trainable up to version `w + max_staleness`. The
learner never moves past that version while the ticket is out (`on_stale: wait`): `blockers` names what it waits for,
and `take` returns the oldest groups first. Nothing is dropped, and nothing is trained too late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import BadStateError
from protocol.messages import Group, Ticket, TicketKind

MAX_ATTEMPTS = 3
"""Failures of one ticket after which the run stops with the last reason."""


@dataclass(frozen=True)
class PreparedTicket:
    """A ticket and the encoded images of its prompt by content hash."""

    ticket: Ticket
    blobs: Mapping[str, bytes]


@dataclass(frozen=True)
class ReceivedGroup:
    """A verified group and the ticket that allowed it."""

    prepared: PreparedTicket
    group: Group

    @property
    def ticket(self) -> Ticket:
        return self.prepared.ticket


@dataclass
class _Outstanding:
    prepared: PreparedTicket
    server_id: str | None = None
    attempts: int = 0
    failed_on: set[str] = field(default_factory=set)
    issued_at: float = field(default_factory=time.monotonic)

    @property
    def is_training(self) -> bool:
        return self.prepared.ticket.kind is TicketKind.TRAIN


@dataclass(frozen=True)
class LedgerCounts:
    """Training groups."""

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
    """Thread-safe. `changed` is notified whenever a group arrives."""

    def __init__(self, *, prompts_per_step: int, max_staleness: int, total_groups: int):
        self._per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._total = total_groups
        self._out: dict[int, _Outstanding] = {}
        self._buffer: dict[int, ReceivedGroup] = {}
        self._evaluated: dict[int, ReceivedGroup] = {}
        self._issued = 0
        self._trained = 0
        self._next_id = 0
        self._reissue: list[int] = []
        self.changed = threading.Condition()

    # --- issuing ------------------------------------------------------------------------------

    def admissible(self, version: int) -> list[int]:
        """Ids of the training tickets that may be issued before `version`."""
        with self.changed:
            limit = min((self._max_staleness + version + 1) * self._per_step, self._total)
            return self._reissue + list(range(self._next_id, limit))

    def issue(self, prepared: Sequence[PreparedTicket]) -> None:
        """Training tickets of `admissible`, or any evaluation tickets."""
        with self.changed:
            for item in prepared:
                self._out[item.ticket.ticket_id] = _Outstanding(item)
            ids = {item.ticket.ticket_id for item in prepared if item.ticket.kind is TicketKind.TRAIN}
            self._issued += len(ids)
            self._next_id = max([self._next_id, *(i + 1 for i in ids)])
            self._reissue = [i for i in self._reissue if i not in ids]

    def waiting(self) -> list[PreparedTicket]:
        """Tickets with no server, oldest first."""
        with self.changed:
            return [entry.prepared for _, entry in sorted(self._out.items()) if entry.server_id is None]

    def assign(self, ticket_ids: Iterable[int], server_id: str) -> None:
        with self.changed:
            for ticket_id in ticket_ids:
                self._out[ticket_id].server_id = server_id

    def held_by(self, server_id: str) -> int:
        with self.changed:
            return sum(entry.server_id == server_id for entry in self._out.values())

    # --- coming back ----------------------------------------------------------------------------

    def outstanding(self, ticket_id: int) -> PreparedTicket | None:
        """The ticket if its group is still awaited."""
        with self.changed:
            entry = self._out.get(ticket_id)
            return entry.prepared if entry else None

    def receive(self, received: ReceivedGroup) -> None:
        """Keep a verified group. Its ticket must still be out."""
        with self.changed:
            entry = self._out.pop(received.ticket.ticket_id)
            shelf = self._buffer if entry.is_training else self._evaluated
            shelf[received.ticket.ticket_id] = received
            self.changed.notify_all()

    def holder(self, ticket_id: int) -> str | None:
        """The server that has this ticket now."""
        with self.changed:
            entry = self._out.get(ticket_id)
            return entry.server_id if entry else None

    def give_back(self, ticket_id: int, reason: str, *, servers: Collection[str] = ()) -> None:
        """Its holder failed at it. Another attempt, but not for ever once all `servers` (the living) have failed."""
        with self.changed:
            entry = self._out.get(ticket_id)
            if entry is None:
                return
            if entry.server_id is not None:
                entry.failed_on.add(entry.server_id)
            entry.server_id = None
            entry.attempts += 1
            if entry.attempts >= MAX_ATTEMPTS and entry.failed_on.issuperset(servers):
                row = entry.prepared.ticket.prompt.row_id
                raise BadStateError(f"ticket {ticket_id} (row {row}) failed {entry.attempts} times: {reason}")

    def may_try(self, ticket_id: int, server_id: str, servers: Collection[str]) -> bool:
        """A server that failed at a ticket gets it again only when all `servers` have: one bad server ends no run."""
        with self.changed:
            failed_on = self._out[ticket_id].failed_on
            return server_id not in failed_on or failed_on.issuperset(servers)

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
            return len(self._buffer) >= self._per_step and not self._late(version)

    def blockers(self, version: int) -> list[tuple[int, str | None, float]]:
        """What a step at `version` waits for: ticket id, server that holds it, seconds since it was issued."""
        with self.changed:
            now = time.monotonic()
            ids = self._late(version) or sorted(i for i, entry in self._out.items() if entry.is_training)
            return [(i, self._out[i].server_id, now - self._out[i].issued_at) for i in ids]

    def _late(self, version: int) -> list[int]:
        """Tickets out for which `version` is the last chance."""
        last = version - self._max_staleness
        out = self._out.items()
        return sorted(i for i, entry in out if entry.is_training and entry.prepared.ticket.min_version <= last)

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

    def evaluation_arrived(self) -> int:
        """Evaluation groups that are here and not taken."""
        with self.changed:
            return len(self._evaluated)

    def take_evaluation(self) -> list[ReceivedGroup]:
        """All evaluation groups that have arrived, in row order."""
        with self.changed:
            taken = [received for _, received in sorted(self._evaluated.items())]
            self._evaluated = {}
            return taken

    # --- account and checkpoint -------------------------------------------------------------------

    def counts(self) -> LedgerCounts:
        with self.changed:
            training = [entry for entry in self._out.values() if entry.is_training]
            waiting = sum(entry.server_id is None for entry in training)
            return LedgerCounts(
                issued=self._issued,
                waiting=waiting,
                in_flight=len(training) - waiting,
                buffered=len(self._buffer),
                trained=self._trained,
            )

    def state(self) -> dict[str, Any]:
        """For the checkpoint: which data has been trained, and which of the issued has not."""
        with self.changed:
            out = [i for i, entry in self._out.items() if entry.is_training]
            return {
                "next_id": self._next_id,
                "trained": self._trained,
                "unfinished": sorted([*out, *self._buffer, *self._reissue]),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the account; unfinished tickets are issued again, with the same ids and seeds."""
        with self.changed:
            self._next_id = int(state["next_id"])
            self._trained = self._issued = int(state["trained"])
            self._reissue = [int(i) for i in state["unfinished"]]
