"""Groups of random tokens, and the transactions that write them into a journal."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import wait
from itertools import count
from pathlib import Path

import numpy as np

from asyncrl.journal.writer import Journal, TicketSlot
from protocol.codec import encode
from protocol.messages import Group
from tests.rigs.fuzz import content

_FOLDER = tempfile.TemporaryDirectory(dir="/dev/shm")
_numbers = count()


def throwaway_journal() -> Journal:
    """A new journal, whose files go when the process ends."""
    return Journal(Path(_FOLDER.name) / f"{next(_numbers)}.sqlite")


def make_group(ticket_id: int, *, length: int = 1000, versions: int | None = None) -> Group:
    """Two trajectories; `versions` None: they change in the middle of each."""
    group = content.group(ticket_id, versions or 0, "s", [length, length])
    if versions is not None:
        return group
    return group.model_copy(update={"versions": np.repeat(np.asarray([4, 5, 4, 5], np.int32), length // 2)})


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


def wait_for_copy(journal: Journal) -> None:
    """Wait until no thread changes the files: they cannot be read at one moment while it does."""
    wait(journal._copier._copies, timeout=20)
