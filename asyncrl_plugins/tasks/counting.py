"""Counting (CLEVR, SuperCLEVR): one number in the answer block."""

from __future__ import annotations

from asyncrl.rewards.builtin import NUMBER, accepted_answers
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.completions import answer_text


def count(sample: RewardSample) -> float:
    """1 if the answer has one number, and it is the reference's. Two numbers are no answer, even if one is right.

    Example: "<think>2 and 3</think><answer>There are 5.</answer>", answer "<answer> 5 </answer>" -> 1
    """
    (expected, *more) = _numbers(answer_text(accepted_answers(sample)[0])) or [None]
    if expected is None or more:
        raise ValueError(f"row {sample.row_id}: counting needs one number as answer, got {sample.answer!r}")
    return float(_numbers(answer_text(sample.completion)) == [expected])


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]
