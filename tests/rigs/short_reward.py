"""A reward that any policy can raise: say little."""

from __future__ import annotations

import time

from asyncrl.rewards.sample import RewardSample


def short(sample: RewardSample) -> float:
    """1 for an empty completion, falling by its length in characters."""
    return 1.0 / (1.0 + len(sample.completion))


def slowly(sample: RewardSample) -> float:
    """Score a tenth of a second later: a run goes on for a while and leaves the processor to others."""
    time.sleep(0.1)
    return short(sample)
