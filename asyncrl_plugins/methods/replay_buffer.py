"""Replay of groups: those that a step has trained, for steps to train once more in the places of filtered ones.

A group without spread teaches nothing. Instead of another prompt, a group with spread of an earlier step may take its
place: the Selective Sample Buffer of Skywork R1V2 (arXiv 2504.16656), which samples by |advantage|, and TRL's
GRPOWithReplayBufferTrainer, which samples by the sum of |advantage| * standard deviation. Both are proportional to

    p = mean |s - mean s|    over the scores s of a group

where an advantage is s - mean s, and TRL's is whatever it divides by. That is what is used here.

A group is in the buffer from the step that trained it until its oldest token is over the staleness bound. So what the
buffer holds is a function of the journal, and a draw is one of the seed, the step and the buffer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import xxhash

from asyncrl.algorithms.filters import SPREAD
from asyncrl.journal.database import JournalView
from asyncrl.journal.writer import TicketSlot
from asyncrl_plugins.methods.settings import SsbConfig
from learner.groups.recorded_batch import as_journaled
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.group_judge import sampled_group
from learner.tickets.replay_buffer import ReplayBuffer


class Ssb(ReplayBuffer):
    """Groups of earlier steps, the most spread first, take the places of filtered ones (SSB)."""

    def __init__(self, settings: SsbConfig, seed: int):
        self._size = settings.size
        self._seed = seed
        self._groups: dict[int, tuple[float, ReceivedGroup]] = {}
        """Spread and group by ticket."""

    @property
    def available(self) -> int:
        """Groups that a step may draw from."""
        return min(len(self._groups), self._size)

    def add(self, trained: Iterable[ReceivedGroup]) -> None:
        """Keep groups as they were sampled, if their scores have spread."""
        for item in trained:
            if (spread := spread_of(item)) > SPREAD:
                self._groups[item.slot.ticket_id] = spread, replace(item, frames=(), is_replayed=True)

    def forget(self, version: int) -> None:
        """Drop groups that have a token over their bound at `version`."""
        self._groups = {i: entry for i, entry in self._groups.items() if entry[1].deadline >= version}

    def restore(self, journal: JournalView, write: Callable[[TicketSlot], PreparedTicket], version: int) -> None:
        """Keep what the journal has for the step at `version`. Raises UserError as `as_journaled` does."""
        for slot in journal.replayable(version):
            self.add([as_journaled(write(slot), journal.group(slot.ticket_id))])
        self.forget(version)

    def draw(self, step: int, count: int) -> list[ReceivedGroup]:
        """Draw `count` different groups: one after the other, each in proportion to its spread. In ticket order.

        A group's key is an exponential random number of rate p, that of step and ticket: the smallest ones win.
        """
        largest = heapq.nlargest(self._size, self._groups.items(), key=lambda entry: (entry[1][0], entry[0]))
        keys = {ticket_id: self._exponential(step, ticket_id) / spread for ticket_id, (spread, _) in largest}
        return [self._groups[i][1] for i in sorted(heapq.nsmallest(count, keys, key=keys.__getitem__))]

    def _exponential(self, step: int, ticket_id: int) -> float:
        digest = xxhash.xxh3_64_intdigest(f"replay {step} {ticket_id}".encode(), seed=self._seed)
        return -math.log((digest + 1) / 2**64)


def spread_of(item: ReceivedGroup) -> float:
    """Compute mean |s - mean s| over the scores of what the policy sampled; 0 where there are none."""
    scores = sampled_group(item).scores()
    return float(np.abs(scores - scores.mean()).mean()) if scores.size else 0.0
