"""A reward that any policy can raise: say little."""

from __future__ import annotations

from asyncrl.rewards.sample import RewardSample


def short(sample: RewardSample) -> float:
    """1 for an empty completion, falling by its length in characters."""
    return 1.0 / (1.0 + len(sample.completion))
