"""Replay buffer: groups that a step has trained, for steps to train once more in the places of filtered ones.

A method of the kind `replay_buffer` names a subclass, which is made as `(settings, seed)`. What it holds is a function
of the journal, and a draw is one of the seed, the step and the buffer: a run that resumes draws as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.journal.database import JournalView
from asyncrl.journal.writer import TicketSlot
from asyncrl.plugins import implementation
from learner.groups.ticket import PreparedTicket, ReceivedGroup


class ReplayBuffer:
    """No groups. Not thread-safe: the ledger's lock guards it."""

    @property
    def available(self) -> int:
        """Groups that a step may draw from."""
        return 0

    def add(self, trained: Iterable[ReceivedGroup]) -> None:
        """Keep groups as they were sampled."""

    def forget(self, version: int) -> None:
        """Drop groups that have a token over their bound at `version`."""

    def restore(self, journal: JournalView, write: Callable[[TicketSlot], PreparedTicket], version: int) -> None:
        """Keep what the journal has for the step at `version`. May raise UserError."""

    def draw(self, step: int, count: int) -> list[ReceivedGroup]:
        """Draw `count` different groups, or fewer. In ticket order."""
        return []


def make_replay_buffer(algorithm: AlgorithmConfig, seed: int) -> ReplayBuffer:
    """The chosen buffer, or one without groups."""
    buffer = ReplayBuffer()
    for method, settings in chosen_hooks("replay_buffer", algorithm).values():  # one at most
        buffer = implementation(method.implementation)(settings, seed)
    return buffer
