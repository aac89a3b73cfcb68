"""Provenance of a batch's tokens: who chose each of them, and the purpose of their trajectories.

Learner and methods ask here, and nowhere else. A new question is one more property; a new answer is one more member of
`TokenSource` or `TrajectoryRole`.
"""
# An operator of a `Column` gives a `Tensor` or an array by its annotation, where it gives the column's own type.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from protocol.messages import Group, TokenSource, TrajectoryRole

ROLES = tuple(TrajectoryRole)
Column = TypeVar("Column", np.ndarray, torch.Tensor)
Other = TypeVar("Other", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class Provenance(Generic[Column]):
    """Provenance of `N` tokens of `B` trajectories, as arrays or as tensors."""

    source: Column
    """[N] uint8 `TokenSource` of each token."""
    role: Column
    """[B] uint8 place of each trajectory's role in `ROLES`."""
    saw_other_images: Column
    """[B] bool: trajectories that were sampled from other images than those that they are trained on."""
    row: Column
    """[N] int64 trajectory of each token."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Provenance[np.ndarray]:
        """Provenance of all tokens of these groups, one group after another."""
        lengths = np.concatenate([group.lengths for group in groups])
        roles = [ROLES.index(record.role) for group in groups for record in group.trajectories]
        others = [bool(record.image_hashes) for group in groups for record in group.trajectories]
        source = np.concatenate([group.source for group in groups])
        row = np.repeat(np.arange(len(lengths)), lengths)
        return Provenance(source, np.array(roles, np.uint8), np.array(others, bool), row)

    @property
    def is_sampled(self) -> Column:
        """[N] bool: tokens that the policy sampled, the greedy ones included."""
        return self.source == TokenSource.POLICY

    @property
    def is_drawn(self) -> Column:
        """[N] bool: tokens that the policy drew at random."""
        return self.is_sampled & ~self.is_baseline[self.row]

    @property
    def is_inserted(self) -> Column:
        """[N] bool: tokens that the ticket put there. No policy sampled them: they have no ratio."""
        return self.source == TokenSource.INSERTED

    @property
    def is_baseline(self) -> Column:
        """[B] bool: greedy trajectories, which are scored and not trained."""
        return self.role == ROLES.index(TrajectoryRole.BASELINE)

    @property
    def is_demonstration(self) -> Column:
        """[B] bool: trajectories of which no token was sampled."""
        return self.role == ROLES.index(TrajectoryRole.DEMONSTRATION)

    @property
    def lacks_behaviour(self) -> Column:
        """[N] bool: tokens whose log-probs of the engine are of another prompt. The proximal policy stands for the
        behaviour's, so that nothing is corrected."""
        return self.saw_other_images[self.row]

    def of_tokens(self, kept: Any) -> Provenance[Column]:
        """Provenance of these of the tokens: places, or [N] bool."""
        return Provenance(self.source[kept], self.role, self.saw_other_images, self.row[kept])

    def map(self, function: Callable[[Column], Other]) -> Provenance[Other]:
        """Provenance with each column converted."""
        return Provenance(*map(function, (self.source, self.role, self.saw_other_images, self.row)))
