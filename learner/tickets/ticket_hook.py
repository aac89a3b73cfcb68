"""Hook for tickets whose trajectories see other images than the row's, such as NoisyRollout's.

A method of the kind `ticket_hook` names a class. The ticket writer makes one object of it with the method's settings,
and calls it for each training ticket. Trajectories are trained on the row's own images; the policy at the start of the
step stands for the behaviour policy of those that saw others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.plugins import implementation


@dataclass(frozen=True)
class TicketRow:
    """Facts of a training ticket that is being written. The same ticket always has the same ones."""

    where: str
    """Name of the row for messages."""
    images: Sequence[bytes]
    """Encoded images of the prompt, in order."""
    trajectories: int
    """Trajectories of the group that the policy samples from the beginning, numbered from 0."""
    done: float
    """Share of the run that is over at the ticket's policy version, 0 to 1."""
    seed: tuple[int, int]
    """Seed of the run, and the ticket's number."""


class TicketHook(Protocol):
    """Object that a method's class makes with its settings."""

    def __call__(self, row: TicketRow) -> Mapping[int, Sequence[bytes]]:
        """Encoded images in place of the row's, one for each and as large, by the number of the trajectory. The same
        bytes for the same row."""
        ...


def ticket_hooks(algorithm: AlgorithmConfig) -> list[TicketHook]:
    """Hooks that the configuration chooses."""
    found = chosen_hooks("ticket_hook", algorithm)
    return [implementation(method.implementation)(settings) for method, settings in found.values()]
