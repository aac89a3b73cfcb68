"""Scores of held-out rows: their means and errors."""

from __future__ import annotations

import math

import pytest

from asyncrl.rewards.score import accuracy_and_reward, evaluation_scores


def test_completions_of_a_row_are_one_observation_and_those_without_a_score_are_counted() -> None:
    rows = [[(1.0, 2.0), (0.0, 1.0)], [(0.0, 0.0), None], [None, None], [(1.0, 3.0), (1.0, 3.0)]]
    scores = evaluation_scores(rows)
    assert scores.accuracy == pytest.approx(3 / 5)
    assert scores.best == pytest.approx(2 / 3), "rows with a right completion, of rows with a score"
    assert scores.reward == pytest.approx(9 / 5)
    assert scores.accuracy_error == pytest.approx(0.5 / math.sqrt(3)), "standard deviation of 0.5, 0, 1 over three rows"
    assert (scores.rows, scores.errors) == (4, 3)
    graded = evaluation_scores([[(1.0, 2.0), (0.5, 1.0)], [(0.0, 0.0), None]])
    assert (scores.is_graded, graded.is_graded) == (False, True)
    assert math.isnan(evaluation_scores([[None]]).accuracy)
    assert math.isnan(evaluation_scores([[(1.0, 1.0)], [None]]).accuracy_error), "one row has no spread"


def test_the_accuracy_is_the_named_component_and_without_a_name_the_reward() -> None:
    components = {"right": 1.0, "short": 0.5}
    assert accuracy_and_reward(components, 1.25, "right") == (1.0, 1.25)
    assert accuracy_and_reward(components, 1.25, "") == (1.25, 1.25)
    assert accuracy_and_reward({}, None, "right") is None
