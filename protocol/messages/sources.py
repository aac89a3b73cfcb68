"""Origin of a completion's tokens, and purpose of its trajectory."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class TokenSource(IntEnum):
    """Origin of a token."""

    POLICY = 0
    """The policy sampled it."""
    OBSERVATION = 1
    """An environment showed it, or a chat template set it around that: context, never trained."""
    INSERTED = 2
    """The ticket put it there: a hint, or a demonstration."""


class TrajectoryRole(StrEnum):
    """Purpose of a trajectory. The ticket decides it, the server records it."""

    TRAIN = "train"
    BASELINE = "baseline"
    """Greedy: scored and not trained."""
    DEMONSTRATION = "demonstration"
    """No token of it was sampled."""
