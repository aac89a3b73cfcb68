"""Hook for tickets whose trajectories differ: some see other images than the row's, or begin with given tokens.

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
from asyncrl.config.sections import DataConfig
from asyncrl.data.survey.row_survey import RowSurvey
from asyncrl.plugins import implementation
from asyncrl.processing.processor import PromptProcessor


@dataclass(frozen=True)
class TicketContext:
    """Parts of the ticket writer that a hook may read."""

    data: DataConfig
    processor: PromptProcessor
    stop_token_ids: tuple[int, ...]
    survey: RowSurvey
    """Training rows."""


@dataclass(frozen=True)
class TicketRow:
    """Facts of a training ticket that is being written. The same ticket always has the same ones."""

    where: str
    """Name of the row for messages."""
    images: Sequence[bytes]
    """Encoded images of the prompt, in order."""
    target: str
    """Text of the row in `data.target_key`; empty where it has none. A hook that reads it needs `target`."""
    trajectories: int
    """Trajectories of the group that no hook inserts whole, numbered from 0."""
    version: int
    """Policy version of the ticket."""
    done: float
    """Share of the run that is over at this version, 0 to 1. A hook that reads it needs `total_steps`."""
    seed: tuple[int, int]
    """Seed of the run, and the ticket's number."""


@dataclass(frozen=True)
class TrajectoryChange:
    """Difference of one trajectory from a sampled one of the row."""

    images: Sequence[bytes] = ()
    """Encoded images in place of the row's, one for each and as large; none: the row's own."""
    prefix: tuple[int, ...] = ()
    """Token ids that the completion begins with. A stop token at their end makes them the whole completion."""


class TicketHook(Protocol):
    """Object that a method's class makes with its settings and a `TicketContext`. May raise UserError."""

    def __call__(self, row: TicketRow) -> Mapping[int, TrajectoryChange]:
        """Changes by the number of the trajectory; the same ones for the same row."""
        ...


def ticket_hooks(algorithm: AlgorithmConfig, context: TicketContext) -> list[TicketHook]:
    """Hooks that the configuration chooses."""
    found = chosen_hooks("ticket_hook", algorithm)
    return [implementation(method.implementation)(settings, context) for method, settings in found.values()]
