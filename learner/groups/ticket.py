"""A ticket as the learner keeps it, the group that comes back for it, and how much of a message a ticket takes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from asyncrl.algorithms.provenance import Provenance
from asyncrl.environments.recording import observation_of
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.encoded_prompt import EncodedPrompt
from protocol.codec import Frame, Limits, encode
from protocol.messages import Group, PartialRollout, Prompt, Ticket, TicketKind, TrajectoryRole

_ENVELOPE_BYTES = 256
"""Header bytes around the tickets of a message."""
_PARTIAL_FRAMES = 5
"""Columns of a partial rollout."""
_BLOB_ENTRY_BYTES = 128
"""Header bytes for each image: its hash and where its frame is."""


@dataclass(frozen=True)
class PreparedTicket:
    """A ticket, its place in the data, and its prompt as the learner has encoded it."""

    ticket: Ticket
    blobs: Mapping[str, bytes]
    """Encoded images of the prompt by content hash."""
    slot: TicketSlot
    measured: EncodedPrompt | None
    """Prompt that the returned group's is compared with; None on a rank that verifies no group."""
    bridge: TurnBridge | None = field(default=None, compare=False)
    """Makes the tokens between turns, where the ticket is that of a conversation."""

    def prompt_of(self, group: Group) -> Prompt:
        """The prompt that its group was sampled from: the row's, with what the environment opened with.

        Raises UserError where that is not whole, or not asked for.
        """
        if not group.opening:
            return self.ticket.prompt
        if self.bridge is None:
            raise UserError(f"row {self.ticket.prompt.row_id}: an environment opened, and the ticket asks for none")
        return self.bridge.opened(self.ticket.prompt, observation_of(group.opening, group.blobs))

    def blobs_of(self, group: Group) -> Mapping[str, bytes | memoryview]:
        """Encoded images of that prompt, and of all observations, by content hash."""
        return {**group.blobs, **self.blobs}

    def measured_of(self, group: Group) -> EncodedPrompt:
        """Prompt that the group must have been sampled from, encoded. Raises as `prompt_of` does."""
        if not group.opening:
            assert self.measured is not None, "the leader verifies"
            return self.measured
        prompt = self.prompt_of(group)
        assert self.bridge is not None, "it has opened the prompt"
        return self.bridge.processor.measure(prompt, self.blobs_of(group))

    def going_on(self, partial: PartialRollout) -> PreparedTicket:
        """Ticket for a server that continues what another has sampled. Raises ValueError where that does not fit."""
        return replace(self, ticket=self.ticket.going_on(partial))

    def anew(self) -> PreparedTicket:
        """Ticket without the samples of another server."""
        if self.ticket.partial is None:
            return self
        return replace(self, ticket=self.ticket.model_copy(update={"partial": None}))

    @cached_property
    def header_bytes(self) -> int:
        """Upper bound of what the ticket adds to a message's header."""
        return len(encode(self.ticket)[0]) + len(self.blobs) * _BLOB_ENTRY_BYTES

    @cached_property
    def blob_bytes(self) -> int:
        partial = self.ticket.partial
        return sum(len(data) for data in self.blobs.values()) + (partial.nbytes if partial else 0)

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
    """Monotonic seconds; for a group from before a restart, the time of the restart."""
    is_replayed: bool = False
    """Whether a step before has trained it, too: it comes from the replay buffer."""

    @property
    def ticket(self) -> Ticket:
        return self.prepared.ticket

    @property
    def slot(self) -> TicketSlot:
        return self.prepared.slot

    @cached_property
    def prompt(self) -> Prompt:
        """Prompt that the group was sampled from."""
        return self.prepared.prompt_of(self.group)

    @property
    def blobs(self) -> Mapping[str, bytes | memoryview]:
        """Encoded images of the prompt and of observations, by content hash."""
        return self.prepared.blobs_of(self.group)

    @cached_property
    def provenance(self) -> Provenance[np.ndarray]:
        """Provenance of the group's tokens."""
        return Provenance.of([self.group])

    @property
    def lacks_baseline(self) -> bool:
        """Whether its greedy trajectory has no score, so that nothing can be said about the others."""
        return any(r.role is TrajectoryRole.BASELINE and r.reward is None for r in self.group.trajectories)

    @cached_property
    def oldest_version(self) -> int:
        """Smallest policy version that sampled a token; where none was sampled, that of the ticket."""
        versions = self.group.versions[~self.provenance.is_inserted]
        return int(versions.min()) if versions.size else self.slot.version

    @cached_property
    def deadline(self) -> int:
        """Last policy version at whose step all tokens are within the bound."""
        return self.oldest_version + self.slot.bound


# --- sizes: dataset columns travel in a message's header, images as frames ----------------------------


def first_that_fit(tickets: Sequence[PreparedTicket], limits: Limits) -> Sequence[PreparedTicket]:
    """The longest prefix that one message may carry; at least one ticket, of which the
    survey of rows has found that it fits (`check_message`).

    Several tickets use only half of a message's bytes, so that assembling a message never takes long.
    """
    half = limits.max_message_bytes // 2
    counts = range(2, len(tickets) + 1)
    too_many = bisect_left(counts, True, key=lambda count: not _fit(tickets[:count], limits, half))
    return tickets[: too_many + 1]


def _fit(tickets: Sequence[PreparedTicket], limits: Limits, most_bytes: int) -> bool:
    frames = 1 + sum(len(item.blobs) + (_PARTIAL_FRAMES if item.ticket.partial else 0) for item in tickets)
    header = _ENVELOPE_BYTES + sum(item.header_bytes for item in tickets)
    size = header + sum(item.blob_bytes for item in tickets)
    return frames <= limits.max_frames and size <= most_bytes and header <= limits.max_header_bytes
