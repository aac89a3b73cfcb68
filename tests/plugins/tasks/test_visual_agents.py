"""Agents of several turns that ship with their recipes: scores of their answers."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.visual_agents import answer_f1

AGENTS = ("deepeyes", "mat_search_turns", "mat_code_turns")
"""Tasks of several turns."""


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<think>x</think><answer>a red car</answer>", "red car", 1.0),
        ("<think>red car</think><answer>car</answer>", "red car", 2 / 3),
        ("<answer>red</answer><answer>car</answer>", ["red", "blue car"], 2 / 3),
        ("<think>x</think><answer>red</answer>", {"ground_truth": ["green", "red"]}, 1.0),
        ("<think>x</think><answer>4</answer>", "<think>t</think><answer>4</answer>", 1.0),
        ("<think>x</think>", "red", 0.0),
    ],
)
def test_answers_are_scored_by_their_words(completion: str, answer: Any, expected: float) -> None:
    assert answer_f1(RewardSample(completion, answer=answer))["answer"] == pytest.approx(expected)
