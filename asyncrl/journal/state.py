"""What a journal says of tickets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TicketSlot:
    """A ticket without its prompt: everything that cannot be derived from the data."""

    ticket_id: int
    position: int
    """Place in the data order."""
    version: int
    """The learner's policy version when it was issued."""
    bound: int
    """Staleness bound that it was issued under, in versions."""


@dataclass(frozen=True)
class JournalState:
    """What a learner that starts finds."""

    counters: dict[str, int]
    waiting: tuple[TicketSlot, ...]
    """Issued, and no group of theirs is here."""
    buffered: tuple[TicketSlot, ...]
    """Their groups are here and not consumed."""
    again: tuple[int, ...]
    """Positions whose group was dropped and that must be issued again."""
    last_step: int
    """The newest step whose groups have been taken; 0 if none."""
