"""Answers by a letter or in a box, as models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.answers import boxed_match, choice_match

Reward = Callable[[RewardSample], float]
CASES: list[tuple[Reward, str, Any, float]] = [
    *[
        (choice_match, text, "B", 1.0)
        for text in ("B", "b.", "(B)", "The answer is B.", "Answer: **B**", "A dog is shown, so the answer is (B).")
    ],
    *[(choice_match, text, "B", 1.0) for text in ("Not (A) but (C)? No: (B)", "\\boxed{B}", "B. a dog")],
    *[(choice_match, text, "B", 0.0) for text in ("A dog", "I would say C", "no idea", "It could be (A) or B")],
    (boxed_match, "first \\boxed{6}, then \\boxed{7}", "7", 1),
    (boxed_match, "\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", 1),
    (boxed_match, "\\boxed{ \\left( 1, 2 \\right) }", "$(1,2)$", 1),
    (boxed_match, "\\boxed{7.0}", "7", 1),
    (boxed_match, "\\boxed{\\leftarrow}", "arrow", 0),  # only \left itself is dropped
    (boxed_match, "\\boxed{7", "7", 0),
    (boxed_match, "\\boxed{5}", 5.0, 1),
    (choice_match, "(B)", ["A", "B"], 1),
]


@pytest.mark.parametrize(("reward", "completion", "answer", "expected"), CASES)
def test_a_completion_scores(reward: Reward, completion: str, answer: Any, expected: float):
    assert reward(RewardSample(completion=completion, answer=answer, row_id="t:0")) == expected


UNUSABLE: list[tuple[Reward, Any]] = [
    (boxed_match, None),
    (choice_match, "E"),
    *[
        (reward, answer)
        for reward in (boxed_match, choice_match)
        for answer in (float("nan"), float("inf"), {"x": 1}, {}, [float("nan")], [["5"]], [{"x": 1}], ["5", None])
    ],
]


@pytest.mark.parametrize(("reward", "answer"), UNUSABLE)
def test_a_row_without_a_usable_answer_is_an_error_that_names_the_row(reward: Reward, answer: Any):
    with pytest.raises(ValueError, match="row t:0"):
        reward(RewardSample(completion="A", answer=answer, row_id="t:0"))
