"""The batch of a step that was made before, from the journal, as it was then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.config.learner import OnStale
from asyncrl.errors import BadStateError
from asyncrl.journal.writer import TicketSlot
from learner.network.verification import check_journaled
from learner.tickets.staleness import within_bound
from learner.tickets.ticket import PreparedTicket, ReceivedGroup
from protocol.messages import Group


class Consumption(Protocol):
    """A journal, or a reader of one."""

    def consumed(self, step: int) -> tuple[TicketSlot, ...]: ...

    def group(self, ticket_id: int) -> Group: ...


def read_batch(journal: Consumption, step: int, size: int) -> list[tuple[TicketSlot, Group]]:
    """The groups that `step` took. Raises BadStateError where they are not `size`, or not kept."""
    slots = journal.consumed(step)
    if len(slots) != size:
        raise BadStateError(
            f"the journal holds {len(slots)} groups of step {step}, expected {size}: it belongs to another checkpoint"
        )
    return [(slot, journal.group(slot.ticket_id)) for slot in slots]


def batch_again(
    groups: Sequence[tuple[TicketSlot, Group]],
    write: Callable[[TicketSlot], PreparedTicket],
    version: int,
    on_stale: OnStale,
) -> list[ReceivedGroup]:
    """The batch that `version` consumes. Raises UserError if a group is of another prompt than its ticket has now."""
    return [within_bound(as_journaled(write(slot), group), version, on_stale) for slot, group in groups]


def as_journaled(prepared: PreparedTicket, group: Group) -> ReceivedGroup:
    check_journaled(group, prepared.ticket, prepared.facts)
    return ReceivedGroup(prepared, group)
