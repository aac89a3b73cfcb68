"""Verifiable reward of the digit task."""

from __future__ import annotations

import re

COMPLETION = re.compile(r"(?:read((?: \d)+) )?answer (\d{1,3})")


def parse(completion: str) -> tuple[list[str], str] | None:
    """Split a completion into the digits it read and its final answer; None if it is malformed."""
    match = COMPLETION.fullmatch(completion.strip())
    if match is None:
        return None
    return (match[1] or "").split(), match[2]


def answer_reward(completion: str, answer: str) -> float:
    """1.0 if the final answer is right."""
    parsed = parse(completion)
    return float(parsed is not None and parsed[1] == answer)


def reading_reward(completion: str, digits: str) -> float:
    """The share of digits read right, place by place; 0.0 if none or a wrong number of digits was read."""
    parsed = parse(completion)
    truth = digits.split()
    if parsed is None or len(parsed[0]) != len(truth):
        return 0.0
    return sum(a == b for a, b in zip(parsed[0], truth)) / len(truth)
