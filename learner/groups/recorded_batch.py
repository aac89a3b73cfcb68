"""Recorded batches: the groups of a step that was made before, read from the journal as they were then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from asyncrl.config.service_sections import OnStale
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.database import JournalView
from asyncrl.journal.writer import TicketSlot
from learner.groups.group_verification import prompt_problems
from learner.groups.staleness import within_bound
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.groups.turn_verification import bridge_problems
from protocol.messages import Group

logger = logging.getLogger(__name__)


class RecordedGroup(NamedTuple):
    slot: TicketSlot
    group: Group
    is_replayed: bool


def read_batch(journal: JournalView, step: int, size: int) -> list[RecordedGroup]:
    """Read the groups that `step` took, then those that it replayed: `size` in all, or fewer where it used the data up.
    Raises BadStateError where there are none or more, or they are not kept."""
    slots = dict.fromkeys(journal.consumed(step), False) | dict.fromkeys(journal.replayed(step), True)
    if not 0 < len(slots) <= size:
        raise BadStateError(
            f"the journal holds {len(slots)} groups of step {step}, expected {size}: it belongs to another checkpoint"
        )
    return [RecordedGroup(slot, journal.group(slot.ticket_id), is_replayed) for slot, is_replayed in slots.items()]


def batch_again(
    groups: Sequence[RecordedGroup],
    write: Callable[[TicketSlot], PreparedTicket],
    version: int,
    on_stale: OnStale,
    *,
    drop_changed: bool = False,
) -> list[ReceivedGroup]:
    """Rebuild the batch that `version` consumes. Raises UserError if a ticket's prompt is not its group's any more.

    With `drop_changed` such groups are left out, and it raises where none is left.
    """
    read = (
        (recorded, read_again(write, recorded.slot, recorded.group, drop_changed=drop_changed)) for recorded in groups
    )
    kept = [replace(item, is_replayed=recorded.is_replayed) for recorded, item in read if item]
    if not kept:
        raise UserError(f"--resume: the rows of all {len(groups)} groups of a step have changed. Put some of them back")
    return [within_bound(item, version, on_stale) for item in kept]


def read_again(
    write: Callable[[TicketSlot], PreparedTicket], slot: TicketSlot, group: Group, *, drop_changed: bool
) -> ReceivedGroup | None:
    """The group with its ticket, written again. Where its row has changed this raises UserError, or with `drop_changed`
    logs it and returns None."""
    try:
        return as_journaled(write(slot), group)
    except UserError as error:
        if not drop_changed:
            raise
        logger.warning("a group is dropped: %s", error)
        return None


def as_journaled(prepared: PreparedTicket, group: Group) -> ReceivedGroup:
    """Pair a journaled group with its ticket. Raises UserError where prompts differ, or what stands between turns."""
    problems = chain(
        prompt_problems(group, prepared.measured_of(group)), bridge_problems(group, prepared.ticket, prepared.bridge)
    )
    if problem := next(problems, None):
        raise UserError(
            f"--resume: the journaled group of ticket {group.ticket_id} was not sampled from row "
            f"{prepared.ticket.prompt.row_id} as it is now: {problem}. Resume with the data, the data.* settings and "
            "the model folder that the run began with, or go on without such groups with --accept-changes"
        )
    return ReceivedGroup(prepared, group)
