"""Groups of random tokens, and the transactions that write them into a journal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.journal.writer import Journal, TicketSlot
from protocol.codec import encode
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus, Turn


def make_group(ticket_id: int, *, length: int = 1000, versions: int | None = None) -> Group:
    """Two trajectories; `versions` None: they change in the middle of each."""
    random = np.random.default_rng(ticket_id)
    changing = np.repeat(np.asarray([4, 5, 4, 5], np.int32), length // 2)
    record = TrajectoryRecord(
        status=TrajectoryStatus.FINISHED,
        finish_reason=FinishReason.STOP,
        rewards={"exact": 0.25},
        reward=0.25,
        turns=(Turn(start=0, end=length),),
    )
    return Group(
        ticket_id=ticket_id,
        server_id="s",
        prompt_ids=np.arange(7, dtype=np.int32),
        image_grids=np.asarray([[1, 4, 4]], np.int32),
        image_hashes=("a" * 64,),
        lengths=np.full(2, length, np.int32),
        token_ids=random.integers(0, 1000, 2 * length).astype(np.int32),
        loss_mask=np.ones(2 * length, np.uint8),
        logprobs=-random.random(2 * length, np.float32),
        versions=changing if versions is None else np.full(2 * length, versions, np.int32),
        kv_versions=None if versions is None else np.full(2 * length, versions, np.int32),
        trajectories=(record, record),
        timings=GroupTimings(queued_s=0.0, generate_s=1.0, reward_s=0.0),
    )


def issue(journal: Journal, slots: Sequence[TicketSlot]) -> None:
    with journal.transaction():
        journal.add_tickets(slots)
        journal.count(issued=len(slots))


def add(journal: Journal, *groups: Group) -> None:
    """The groups of tickets that were issued."""
    with journal.transaction():
        for group in groups:
            journal.add_group(group.ticket_id, encode(group))


def take(journal: Journal, step: int, slots: Sequence[TicketSlot]) -> None:
    with journal.transaction():
        journal.consume(step, slots)
        journal.count(trained=len(slots))


def slots_of(groups: Sequence[Group]) -> list[TicketSlot]:
    """A ticket for each group, issued at version 0."""
    return [TicketSlot(group.ticket_id, group.ticket_id, 0, 1) for group in groups]


def issue_and_add(journal: Journal, *groups: Group) -> None:
    issue(journal, slots_of(groups))
    add(journal, *groups)
