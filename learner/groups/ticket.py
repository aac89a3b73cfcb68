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
from asyncrl.processing.processor import MeasuredPrompt
from protocol.codec import Frame, Limits, encode
from protocol.messages import Group, PartialRollout, Prompt, Ticket, TicketKind, TrajectoryRole

_ENVELOPE_BYTES = 256
"""Header bytes around the tickets of a message."""
_PARTIAL_FRAMES = 5
"""Columns of a partial rollout."""
_BLOB_ENTRY_BYTES = 128
"""Header bytes for each image: its hash and where its frame is."""


@dataclass(frozen=True)
class PromptFacts:
    """Facts that a returned group's prompt is compared with."""

    token_ids: np.ndarray
    """[P] int32, image placeholders expanded."""
    image_grids: np.ndarray
    """[images, 3] int32, see `ImageGrids`; of the Qwen-VL families temporal, height, width in patches."""
    image_hashes: tuple[str, ...]
    video_grids: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    """[videos, 3] int32"""
    video_hashes: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompt: MeasuredPrompt) -> PromptFacts:
        return cls(prompt.token_ids, prompt.image_grids, prompt.image_hashes, prompt.video_grids, prompt.video_hashes)


@dataclass(frozen=True)
class PreparedTicket:
    """A ticket, its place in the data, and what its prompt must look like when it comes back."""

    ticket: Ticket
    blobs: Mapping[str, bytes]
    """Encoded images of the prompt by content hash."""
    slot: TicketSlot
    facts: PromptFacts
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

    def facts_of(self, group: Group) -> PromptFacts:
        """Facts of the expected prompt. Raises as `prompt_of` does."""
        if not group.opening:
            return self.facts
        prompt = self.prompt_of(group)
        assert self.bridge is not None, "it has opened the prompt"
        return PromptFacts.of(self.bridge.processor.measure(prompt, self.blobs_of(group)))

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
