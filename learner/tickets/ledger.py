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

A group that a filter drops (`group_judge.py`) gives its place to the next position of the data; its own is not issued
again. It is judged in the transaction that journals it; on-policy when all that were issued with it have arrived, so
that what is sampled together does not depend on which came first. When no position is left, the last step takes what is
there, and the ledger `is_over`.

While the replay buffer (`replay_buffer.py`) has a group for it, the place is *reserved* as its group is dropped: no
ticket is issued for it until the buffer has none any more, and a step that has too few new groups, but one at least,
fills reserved places from the buffer. So nothing becomes due too early, and no step waits for the buffer. A replayed
group was counted as trained when it was consumed, and is not counted again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from asyncrl.config.service_sections import OnStale
from asyncrl.data.prompt_sources import PromptSource
from asyncrl.journal.database import DROPPED
from asyncrl.journal.writer import Journal, TicketSlot
from learner.groups.recorded_batch import batch_again, read_again, read_batch
from learner.groups.staleness import crowded_deadline, has_fresh_tokens, within_bound
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.assignments import OutstandingTickets
from learner.tickets.evaluation import Evaluation
from learner.tickets.group_judge import GroupJudge
from learner.tickets.length_bias import LengthBias
from learner.tickets.replay_buffer import ReplayBuffer
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.codec import encode
from protocol.faults import crash_point

logger = logging.getLogger(__name__)


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
    def arrived(self) -> int:
        """Groups that are awaited no more, of the whole run: they never become fewer."""
        return self.issued - self.waiting - self.in_flight

    @property
    def residual(self) -> int:
        """0 at every instant; anything else is a lost or doubled group."""
        known = self.waiting + self.in_flight + self.buffered + self.trained + sum(self.dropped.values())
        return self.issued - known

    def describe_dropped(self) -> str:
        """`zero_variance 12, stale 1`: the most frequent reason first."""
        by_number = sorted(self.dropped.items(), key=lambda item: -item[1])
        return ", ".join(f"{reason} {number}" for reason, number in by_number if number) or "none"


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
        judge: GroupJudge | None = None,
        replay: ReplayBuffer | None = None,
    ):
        """`deadline`: of a server for a ticket; None: with its defaults. `judge`: filters and prompt source; None:
        every position is issued, and every group kept. `replay`: groups for the places of filtered ones; None: none."""
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
        self._judge = judge or GroupJudge(PromptSource(total_groups))
        self._judge.source.restore(recorded.prompt_source)
        self._replay = replay or ReplayBuffer()
        self._unjudged: set[int] = set()
        """Tickets whose groups are buffered and wait for those that were issued with them."""
        self._again = list(recorded.again)
        self._unfinished, self._arrived_before = recorded.waiting, recorded.buffered
        self.lengths = LengthBias(self._counters)

    # --- issuing ------------------------------------------------------------------------------

    def admissible(self, version: int) -> list[TicketSlot]:
        """Training tickets that may be issued before `version` (idempotent until `issue`)."""
        with self.changed:
            capacity = min((self.bound + version + 1) * self._per_step, self._total)
            without_ticket = sum(self._counters[name] for name in ("unfilled", "replayed", "reserved"))
            free = max(0, capacity - without_ticket - (self._counters["issued"] - self._num_dropped))
            again, next_id = self._again[:free], self._counters["next_id"]
            fresh = self._judge.source.next(free - len(again), self._counters["next_position"])
            positions = enumerate([*again, *fresh])
            return [TicketSlot(next_id + i, position, version, self.bound) for i, position in positions]

    @property
    def _num_dropped(self) -> int:
        return sum(count for name, count in self._counters.items() if name.startswith(DROPPED))

    def issue(self, prepared: Sequence[PreparedTicket]) -> None:
        """Make training tickets of `admissible`, or evaluation tickets, wait for a server."""
        with self.changed:
            slots = [item.slot for item in prepared if item.is_training]
            if slots:
                positions = {slot.position for slot in slots}
                fresh = positions.difference(self._again)
                passed = max(fresh) + 1 - self._counters["next_position"] if fresh else 0
                with self.journal.transaction():
                    self.journal.add_tickets(slots)
                    self._count(issued=len(slots), next_id=len(slots), next_position=passed)
                    if passed > len(fresh):
                        self._count(skipped=passed - len(fresh))
                    if not slots[0].bound:
                        self._count(issued_together_from=slots[0].ticket_id - self._counters["issued_together_from"])
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
            first = self._counters["issued_together_from"]
            return [
                item.prepared
                for ticket_id, item in self._buffer.items()
                if item.slot.version in versions and ticket_id >= first
            ]

    # --- coming back ----------------------------------------------------------------------------

    def was_issued(self, ticket_id: int) -> bool:
        """Whether this run has issued the training ticket, or this process the evaluation ticket: its group may be a
        duplicate."""
        with self.changed:
            return ticket_id < self._counters["next_id"] or ticket_id in self._evaluation_ids

    def receive(self, received: Sequence[ReceivedGroup]) -> None:
        """Keep verified groups, or drop them by a filter, durably on return. Their tickets must still be out."""
        with self.changed:
            training = {item.slot.ticket_id: item for item in received if item.prepared.is_training}
            if training:
                judged = self._due_for_judgement(training)
                verdicts = self._judge.judge([(training.get(i) or self._buffer[i]) for i in judged])
                with self.journal.transaction():
                    for item in training.values():
                        if item.slot not in verdicts.reasons:
                            self.journal.add_group(item.group.ticket_id, item.frames or encode(item.group))
                    self.journal.set_prompt_source(verdicts.source)
                    self.journal.filter_out(verdicts.reasons)
                    self._count(**Counter(DROPPED + reason for reason in verdicts.reasons.values()))
                    self._reserve(len(verdicts.reasons))
                self._buffer |= training
                self._unjudged = (self._unjudged | training.keys()) - judged
                for slot in verdicts.reasons:
                    del self._buffer[slot.ticket_id]
            for item in received:
                self.out.remove(item.ticket.ticket_id, item.group.server_id)
                if not item.prepared.is_training and self.evaluation is not None:
                    self.evaluation.keep(item)
            self._drop_stale()
            self.changed.notify_all()

    def _due_for_judgement(self, arriving: Mapping[int, ReceivedGroup]) -> set[int]:
        """Tickets to judge as these arrive: on-policy, all that were issued together, with the last of them."""
        if self._judge.is_idle:
            return {*arriving}
        waited_for = {i for i, entry in self.out.training().items() if not entry.prepared.slot.bound} - arriving.keys()
        off_policy = {i for i, item in arriving.items() if item.slot.bound}
        return off_policy if waited_for else {*arriving, *self._unjudged}

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
            is_whole = len(self._buffer) + self._counters["reserved"] >= self._per_step
            return bool(self._buffer) and (is_whole or self._is_used_up) and not self._late(self._earliest())

    def _reserve(self, dropped: int = 0) -> None:
        """Reserve places of dropped groups, and give back those that the buffer has no group for, in a transaction."""
        reserved = self._counters["reserved"]
        if change := min(reserved + dropped, self._replay.available, self._per_step - 1) - reserved:
            self._count(reserved=change)

    @property
    def _is_used_up(self) -> bool:
        """Whether no group is awaited, and no position is left to be issued."""
        is_out = bool(self._again or self.out.training())
        return not is_out and not self._judge.source.next(1, self._counters["next_position"])

    @property
    def is_over(self) -> bool:
        """Whether no step can be made any more: all groups are trained or dropped, and the data is used up."""
        with self.changed:
            return not self._buffer and self._is_used_up

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

    def late(self) -> list[int]:
        """Tickets that must arrive before the next step, though it has all its groups."""
        with self.changed:
            return self._late(self._earliest())

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
        """Take `prompts_per_step` groups in ticket order, stale tokens masked; from now on they count as trained.

        Those that are replayed come last. When the data is used up, the last step takes what is left.
        """
        with self.changed:
            assert self.ready(), "take() before ready()"
            earliest = self._earliest()
            ids = sorted(earliest)
            sampled = [self._buffer[i] for i in ids]
            taken = [within_bound(item, self._version, self._on_stale) for item in sampled]
            step, empty = self._version + 1, self._per_step - len(taken)
            drawn = self._replay.draw(step, min(empty, self._counters["reserved"]))
            replayed = [within_bound(item, self._version, self._on_stale) for item in drawn]
            with self.journal.transaction():
                self.journal.consume(step, [item.slot for item in taken])
                self._count(trained=len(taken), **self.lengths.trained(sampled, taken))
                if replayed:
                    self.journal.replay(step, [item.slot for item in replayed])
                    self._count(replayed=len(replayed), reserved=-len(replayed))
                if unfilled := empty - len(replayed):
                    self._count(unfilled=unfilled)
                self._replay.add(sampled)
                self._replay.forget(step)
                self._reserve()
            for i in ids:
                del self._buffer[i]
            self.last_step = step
        crash_point("step.consumed")
        return taken + replayed

    # --- after a restart --------------------------------------------------------------------------

    def recover(
        self, write: Callable[[TicketSlot], PreparedTicket], *, withhold_s: float, drop_changed: bool = False
    ) -> None:
        """Restore from the journal: arrived groups to the buffer, tickets to `out`, for servers that still have them.

        A journaled group of another prompt than its ticket has now raises UserError. With `drop_changed` it is dropped,
        and its position is issued again.
        """
        with self.changed:
            until = time.monotonic() + withhold_s
            for slot in self._unfinished:
                self.out.add(write(slot), withheld_until=until)
            gone: list[TicketSlot] = []
            for slot in self._arrived_before:
                group = self.journal.group(slot.ticket_id)
                if item := read_again(write, slot, group, drop_changed=drop_changed):
                    self._buffer[slot.ticket_id] = item
                else:
                    gone.append(slot)
            if gone:
                with self.journal.transaction():
                    self.journal.drop_tickets(gone)
                    self._count(dropped_stale=len(gone))
                self._again = sorted([*self._again, *(slot.position for slot in gone)])
            if any(not slot.bound for slot in self._unfinished):  # else the last to arrive has had them judged
                first = self._counters["issued_together_from"]
                self._unjudged = {i for i, item in self._buffer.items() if not item.slot.bound and i >= first}
            self._unfinished = self._arrived_before = ()
            self._replay.restore(self.journal, write, self.last_step)
            with self.journal.transaction() if self._counters["reserved"] else nullcontext():
                self._reserve()  # the buffer may have another size than before

    def take_again(
        self, step: int, write: Callable[[TicketSlot], PreparedTicket], *, drop_changed: bool = False
    ) -> list[ReceivedGroup]:
        """The batch that `step` took before the restart, as it was. Raises and drops as `recover` does."""
        with self.changed:
            groups = read_batch(self.journal, step, self._per_step)
        # Without the lock: reading images takes its time.
        return batch_again(groups, write, self._version, self._on_stale, drop_changed=drop_changed)

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
                dropped={"stale": 0}
                | {
                    name.removeprefix(DROPPED): count
                    for name, count in sorted(self._counters.items())
                    if name.startswith(DROPPED)
                },
            )

    def length_bias(self) -> dict[str, float]:
        """See learner/tickets/length_bias.py."""
        with self.changed:
            return self.lengths.report(self._buffer.values())
