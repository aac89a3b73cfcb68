"""Recorded batches: the groups of a step that was made before, read from the journal as they were then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.config.sections import OnStale
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.reader import JournalView
from asyncrl.journal.writer import TicketSlot
from learner.network.group_verification import prompt_problems
from learner.tickets.staleness import within_bound
from learner.tickets.ticket import PreparedTicket, ReceivedGroup
from protocol.messages import Group


def read_batch(journal: JournalView, step: int, size: int) -> list[tuple[TicketSlot, Group]]:
    """Read the groups that `step` took: `size`, or fewer where it used the data up. Raises BadStateError where there
    are none or more, or they are not kept."""
    slots = journal.consumed(step)
    if not 0 < len(slots) <= size:
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
    """Rebuild the batch that `version` consumes. Raises UserError if a ticket's prompt is not its group's any more."""
    return [within_bound(as_journaled(write(slot), group), version, on_stale) for slot, group in groups]


def as_journaled(prepared: PreparedTicket, group: Group) -> ReceivedGroup:
    """Pair a journaled group with its ticket. Raises UserError if their prompts differ."""
    if problem := next(prompt_problems(group, prepared.facts), None):
        raise UserError(
            f"--resume: the journaled group of ticket {group.ticket_id} was not sampled from row "
            f"{prepared.ticket.prompt.row_id} as it is now: {problem}. Resume with the data, the data.* settings and "
            "the model folder that the run began with"
        )
    return ReceivedGroup(prepared, group)
