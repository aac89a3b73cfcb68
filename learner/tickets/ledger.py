"""The ticket ledger: bounded staleness by admission, back-pressure, and an account of every group.

A training ticket is *waiting* (issued, with no server), *in flight* (with a server), *buffered* (its group is here),
*trained* or *dropped*; at every instant `issued = waiting + in_flight + buffered + trained + dropped`. Every change
but the handing out is in the journal before it is visible here. Evaluation tickets travel the same way, are counted
apart (`evaluation`) and are not journaled.

Admission: before version v, at most `(bound + v + 1) * prompts_per_step` tickets have been issued and not dropped. A
ticket issued at version w is sampled by version w or newer, so its *deadline* is the step at version `w + bound`; that
of a group that has arrived is its oldest token's version plus the bound. A step takes the groups with the earliest
deadlines. What happens to a ticket whose group is not there in time is `on_stale`:

- wait: the learner makes no step after which more tickets would be due by some version than steps are left until
  then (`blockers` names what it waits for). Nothing is dropped, and nothing becomes too old.
- drop: the learner goes on; a group with an older token is dropped, and its position in the data issued again.
- mask: the learner goes on; tokens that are too old leave the loss. A group with no token left is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.sections import OnStale
from asyncrl.journal.writer import Journal, TicketSlot
from learner.tickets.assignments import OutstandingTickets
from learner.tickets.evaluation import Evaluation
from learner.tickets.length_bias import LengthBias
from learner.tickets.recorded_batch import as_journaled, batch_again, read_batch
from learner.tickets.staleness import crowded_deadline, has_fresh_tokens, within_bound
from learner.tickets.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.codec import encode
from protocol.faults import crash_point

logger = logging.getLogger(__name__)

STALE = "dropped_stale"
"""Name of the counter of dropped groups in the journal."""


@dataclass(frozen=True)
class LedgerCounts:
    """Numbers of training groups in each state."""

    issued: int
    waiting: int
    in_flight: int
    buffered: int
    trained: int
    dropped: Mapping[str, int]
    """Dropped groups by reason."""

    @property
    def residual(self) -> int:
        """0 at every instant; anything else is a lost or doubled group."""
        known = self.waiting + self.in_flight + self.buffered + self.trained + sum(self.dropped.values())
        return self.issued - known


class TicketLedger:
    """Thread-safe. `changed` is notified whenever a group arrives."""

    def __init__(
        self,
        journal: Journal,
        *,
        prompts_per_step: int,
        bound: int,
        total_groups: int,
        on_stale: OnStale = "wait",
        deadline: TicketDeadline | None = None,
    ):
        """`deadline`: of a server for a ticket; None: with its defaults."""
        self.changed = threading.Condition()
        self.journal = journal
        self.bound = bound
        """Staleness bound of tickets that are issued from now on."""
        self._per_step = prompts_per_step
        self._total = total_groups
        self._on_stale: OnStale = on_stale
        self.out = OutstandingTickets(self.changed, deadline or TicketDeadline())
        """Tickets whose groups are awaited, and which servers have each."""
        self._buffer: dict[int, ReceivedGroup] = {}
        self.evaluation: Evaluation | None = None
        """The evaluation that is running."""
        self._evaluation_ids: set[int] = set()
        """Every evaluation ticket that this process has issued."""
        self._version = 0
        recorded = journal.state()
        self.last_step = recorded.last_step
        """The newest step that has taken its groups. A learner behind it makes its steps again from the journal."""
        self._counters = Counter(recorded.counters)
        self._again = list(recorded.again)
        self._unfinished, self._arrived_before = recorded.waiting, recorded.buffered
        self.lengths = LengthBias(self._counters)

    # --- issuing ------------------------------------------------------------------------------

    def admissible(self, version: int) -> list[TicketSlot]:
        """Training tickets that may be issued before `version` (idempotent until `issue`)."""
        with self.changed:
            capacity = (self.bound + version + 1) * self._per_step
            free = capacity - (self._counters["issued"] - self._counters[STALE])
            next_position, next_id = self._counters["next_position"], self._counters["next_id"]
            fresh = range(next_position, min(next_position + max(0, free), self._total))
            positions = [*self._again, *fresh][: max(0, free)]
            return [TicketSlot(next_id + i, position, version, self.bound) for i, position in enumerate(positions)]

    def issue(self, prepared: Sequence[PreparedTicket]) -> None:
        """Make training tickets of `admissible`, or evaluation tickets, wait for a server."""
        with self.changed:
            slots = [item.slot for item in prepared if item.is_training]
            if slots:
                positions = {slot.position for slot in slots}
                fresh = len(positions) - len(positions.intersection(self._again))
                with self.journal.transaction():
                    self.journal.add_tickets(slots)
                    self._count(issued=len(slots), next_id=len(slots), next_position=fresh)
                self._again = [position for position in self._again if position not in positions]
                crash_point("tickets.journaled")
            for item in prepared:
                self.out.add(item)
                if not item.is_training:
                    self._evaluation_ids.add(item.ticket.ticket_id)

    def _count(self, **deltas: int) -> None:
        """Add to the counters in the journal's transaction and here: an exception between the two stops the run."""
        self.journal.count(**deltas)
        self._counters.update(deltas)

    def batch_mates(self, tickets: Sequence[PreparedTicket]) -> list[PreparedTicket]:
        """Tickets whose groups are buffered and were sampled, on-policy, in one batch with these.

        The last bits of a log-prob depend on what else is in the batch. When a server was lost in the middle of one,
        its successor samples all of it again, and a run that was killed ends with the weights of one that was not.
        """
        with self.changed:
            versions = {item.slot.version for item in tickets if item.slot.bound == 0 and item.is_training}
            return [item.prepared for item in self._buffer.values() if item.slot.version in versions]

    # --- coming back ----------------------------------------------------------------------------

    def was_issued(self, ticket_id: int) -> bool:
        """Whether this run has issued the training ticket, or this process the evaluation ticket: its group may be a
        duplicate."""
        with self.changed:
            return ticket_id < self._counters["next_id"] or ticket_id in self._evaluation_ids

    def receive(self, received: Sequence[ReceivedGroup]) -> None:
        """Keep verified groups, durably on return. Their tickets must still be out."""
        with self.changed:
            training = [item for item in received if item.prepared.is_training]
            if training:
                with self.journal.transaction():
                    for item in training:
                        self.journal.add_group(item.group.ticket_id, item.frames or encode(item.group))
            for item in received:
                self.out.remove(item.ticket.ticket_id, item.group.server_id)
                if item.prepared.is_training:
                    self._buffer[item.ticket.ticket_id] = item
                elif self.evaluation is not None:
                    self.evaluation.keep(item)
            self._drop_stale()
            self.changed.notify_all()

    # --- consuming ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The learner's policy version, whose step comes next."""
        return self._version

    def advance(self, version: int) -> None:
        """Note that the learner has made its step and is now at `version`."""
        with self.changed:
            self._version = version
            self._drop_stale()
            self.changed.notify_all()

    def ready(self) -> bool:
        """Whether a step can be made now."""
        with self.changed:
            return len(self._buffer) >= self._per_step and not self._late(self._earliest())

    def _earliest(self) -> list[int]:
        """Ids of the groups that the next step takes, by deadline, then by age."""
        by_deadline = sorted(self._buffer.items(), key=lambda item: (item[1].deadline, item[0]))
        return [ticket_id for ticket_id, _ in by_deadline[: self._per_step]]

    def coming(self) -> list[ReceivedGroup]:
        """The groups here that the next step will take, unless others arrive that are due before them."""
        with self.changed:
            return [self._buffer[i] for i in self._earliest()]

    def blockers(self) -> list[tuple[int, str | None, float]]:
        """Tickets that the next step waits for: id, servers that hold it, seconds since it was issued."""
        with self.changed:
            now = time.monotonic()
            out = self.out.training()
            ids = self._late(self._earliest()) or sorted(out)
            return [(i, ", ".join(out[i].holders) or None, now - out[i].issued_at) for i in ids]

    def _late(self, earliest: list[int]) -> list[int]:
        """Tickets that must arrive before the next step, for later steps to take all that is due by then (`wait`)."""
        if self._on_stale != "wait":
            return []
        out = {i: entry.deadline for i, entry in self.out.training().items()}
        taken = set(earliest)
        left = [item.deadline for i, item in self._buffer.items() if i not in taken]
        crowded = crowded_deadline([*out.values(), *left], self._version, self._per_step)
        return [] if crowded is None else sorted(i for i, deadline in out.items() if deadline <= crowded)

    def _drop_stale(self) -> None:
        """Drop groups that cannot be trained any more, under `drop` and `mask`: new tickets take their places."""
        if self._on_stale == "wait":
            return
        whole = self._on_stale == "drop"
        stale = [item for item in self._buffer.values() if not has_fresh_tokens(item, self._version, all_of_them=whole)]
        if not stale:
            return
        logger.debug("dropping tickets %s, whose groups are too old", [item.slot.ticket_id for item in stale])
        with self.journal.transaction():
            self.journal.drop_tickets([item.slot for item in stale])
            self._count(dropped_stale=len(stale), **self.lengths.dropped(stale))
        for item in stale:
            del self._buffer[item.slot.ticket_id]
        self._again = sorted([*self._again, *(item.slot.position for item in stale)])

    def take(self) -> list[ReceivedGroup]:
        """Take `prompts_per_step` groups in ticket order, stale tokens masked; from now on they count as trained."""
        with self.changed:
            earliest = self._earliest()
            assert len(earliest) == self._per_step, "take() before ready()"
            assert not self._late(earliest), "take() before ready()"
            ids = sorted(earliest)
            sampled = [self._buffer[i] for i in ids]
            taken = [within_bound(item, self._version, self._on_stale) for item in sampled]
            with self.journal.transaction():
                self.journal.consume(self._version + 1, [item.slot for item in taken])
                self._count(trained=len(taken), **self.lengths.trained(sampled, taken))
            for i in ids:
                del self._buffer[i]
            self.last_step = self._version + 1
        crash_point("step.consumed")
        return taken

    # --- after a restart --------------------------------------------------------------------------

    def recover(self, write: Callable[[TicketSlot], PreparedTicket], *, withhold_s: float) -> None:
        """Restore from the journal: arrived groups to the buffer, tickets to `out`, for servers that still have them.

        Raises UserError if a journaled group is of another prompt than its ticket has now.
        """
        with self.changed:
            until = time.monotonic() + withhold_s
            for slot in self._unfinished:
                self.out.add(write(slot), withheld_until=until)
            for slot in self._arrived_before:
                self._buffer[slot.ticket_id] = as_journaled(write(slot), self.journal.group(slot.ticket_id))
            self._unfinished = self._arrived_before = ()

    def take_again(self, step: int, write: Callable[[TicketSlot], PreparedTicket]) -> list[ReceivedGroup]:
        """The batch that `step` took before the restart, as it was. Raises as `recover` does."""
        with self.changed:
            groups = read_batch(self.journal, step, self._per_step)
        # Without the lock: reading images takes its time.
        return batch_again(groups, write, self._version, self._on_stale)

    def flush_journal(self) -> None:
        self.journal.sync_groups()  # most of it without the lock: groups go on arriving
        with self.changed:
            self.journal.flush()

    def forget_payloads(self, step: int, *, keep_bytes: int = 0) -> int:
        """Delete groups up to this step, which a checkpoint holds. See `Journal.forget_payloads`."""
        with self.changed:
            return self.journal.forget_payloads(step, keep_bytes=keep_bytes)

    # --- account ------------------------------------------------------------------------------------

    def counts(self) -> LedgerCounts:
        with self.changed:
            training = self.out.training()
            waiting = sum(not entry.holders for entry in training.values())
            return LedgerCounts(
                issued=self._counters["issued"],
                waiting=waiting,
                in_flight=len(training) - waiting,
                buffered=len(self._buffer),
                trained=self._counters["trained"],
                dropped={"stale": self._counters[STALE]},
            )

    def length_bias(self) -> dict[str, float]:
        """See learner/tickets/length_bias.py."""
        with self.changed:
            return self.lengths.report(self._buffer.values())
