"""A ticket as the learner keeps it, and the group that comes back for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from asyncrl.journal.writer import TicketSlot
from asyncrl.models.processing import PromptFacts
from learner.tickets.ticket_size import header_bytes
from protocol.codec import Frame
from protocol.messages import Group, Ticket, TicketKind


@dataclass(frozen=True)
class PreparedTicket:
    """A ticket, its place in the data, and what its prompt must look like when it comes back."""

    ticket: Ticket
    blobs: Mapping[str, bytes]
    """Encoded images of the prompt by content hash."""
    slot: TicketSlot
    facts: PromptFacts

    @cached_property
    def header_bytes(self) -> int:
        """What it adds to a message's header."""
        return header_bytes(self.ticket, len(self.blobs))

    @cached_property
    def blob_bytes(self) -> int:
        return sum(len(data) for data in self.blobs.values())

    @property
    def is_training(self) -> bool:
        return self.ticket.kind is TicketKind.TRAIN


@dataclass(frozen=True)
class ReceivedGroup:
    """A verified group and the ticket that allowed it."""

    prepared: PreparedTicket
    group: Group
    frames: Sequence[Frame] = ()
    """The group as it travelled; empty if it did not."""
    arrived_at: float = field(default_factory=time.monotonic, compare=False)
    """Monotonic seconds; of a group from before a restart, those of the restart."""

    @property
    def ticket(self) -> Ticket:
        return self.prepared.ticket

    @property
    def slot(self) -> TicketSlot:
        return self.prepared.slot

    @cached_property
    def oldest_version(self) -> int:
        """Of its tokens; of its ticket if it has none."""
        versions = self.group.versions
        return int(versions.min()) if versions.size else self.slot.version

    @cached_property
    def deadline(self) -> int:
        """Last policy version at whose step all its tokens are within the bound."""
        return self.oldest_version + self.slot.bound
