"""Verifiable rewards of the demos. A good completion about a picture is `not red? blue. Answer: yes`."""

from __future__ import annotations

import re

from asyncrl.rewards.sample import RewardSample

ANSWER = re.compile(r"(?s)(?:.*\b)?answer: (\w+)\.?", re.IGNORECASE)


def right(sample: RewardSample) -> float:
    """1.0 if the completion ends with the right answer."""
    match = ANSWER.fullmatch(sample.completion.strip())
    return float(match is not None and match[1].lower() == sample.answer)


def seen(sample: RewardSample) -> float:
    """1.0 if the attribute that the question is about was read right from the picture."""
    match = re.match(r"(?:not )?\w+\? (\w+)\. ", sample.completion.strip())
    return float(match is not None and match[1] in (sample.columns["colour"], sample.columns["shape"]))
