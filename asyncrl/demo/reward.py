"""Verifiable rewards of the digit-reading task. A good completion is `read 3 7 answer 10`."""

from __future__ import annotations

import re

from asyncrl.rewards.sample import RewardSample

COMPLETION = re.compile(r"read((?: \d)+) answer (\d{1,3})")


def answer(sample: RewardSample) -> float:
    """1.0 if the final answer is right."""
    match = COMPLETION.fullmatch(sample.completion.strip())
    return float(match is not None and match[2] == sample.answer)


def reading(sample: RewardSample) -> float:
    """The share of digits read right, place by place; 0.0 if none or a wrong number of digits was read."""
    match = COMPLETION.fullmatch(sample.completion.strip())
    read = match[1].split() if match else []
    truth = sample.columns["digits"].split()
    if len(read) != len(truth):
        return 0.0
    return sum(a == b for a, b in zip(read, truth, strict=True)) / len(truth)
