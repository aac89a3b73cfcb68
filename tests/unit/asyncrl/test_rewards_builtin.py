"""The rewards that come with asyncrl, on completions as models write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.rewards.builtin import BUILTIN_REWARDS, soft_overlong
from asyncrl.rewards.sample import RewardSample
from tests.rigs.tiny import ROOT


def score(name: str, completion: str, answer: Any = None, **kwargs: Any) -> float:
    return BUILTIN_REWARDS[name](RewardSample(completion=completion, answer=answer, row_id="t:0"), **kwargs)


CASES: list[tuple[str, str, Any, dict[str, Any], float]] = [
    ("exact_match", " Paris\n", "Paris", {}, 1),
    ("exact_match", "paris", "Paris", {}, 0),
    ("exact_match", "paris", "Paris", {"ignore_case": True}, 1),
    ("exact_match", "cat", ["dog", "cat"], {}, 1),
    ("contains", "The capital is Paris.", "paris", {}, 1),
    ("contains", "The capital is Paris.", "paris", {"ignore_case": False}, 0),
    ("contains", "It is 11.", "1", {"whole_words": False}, 1),
    ("number_match", "5-3", 3, {}, 1),  # a minus between numbers is no sign
    ("number_match", "x = \N{MINUS SIGN}3", -3, {}, 1),
    ("number_match", "1,234,567 in total", "1234567", {}, 1),
    ("number_match", "first 4, then 3", "4", {}, 0),
    ("number_match", ".5", 0.5, {}, 1),
    ("number_match", "it is 72", "8 * 9 = 72\n#### 72", {}, 1),
    ("number_match", "1000001", 1000000, {}, 0),  # the tolerance is absolute
    ("number_match", "3.33", "3.3333", {"tolerance": 0.01}, 1),
    ("number_match", "102", 100, {"relative_tolerance": 0.01}, 0),
    *[
        (name, completion, answer, {}, right)
        for name in ("exact_match", "contains", "number_match")
        for completion, answer, right in (
            ("5", 5.0, 1),  # a column of whole numbers with a gap, as pandas has it
            ("5.0", 5.0, 1),
            ("-12", -12.0, 1),
            ("2.5", 2.5, 1),
            ("0.1", 0.10000000149011612, 1),  # of 32 bits
            ("6", [5.0, 6.0], 1),
            ("5", [5.0, 6.0], 1),
            ("7", [5.0, 6.0], 0),
        )
    ],
    ("exact_match", "true", True, {}, 1),
    ("exact_match", "False", False, {}, 1),
    ("contains", "15.0 or 5.5", 5.0, {}, 0),
    ("number_match", "6 of them", ["5", "6"], {}, 1),
    ("format_think", "<think>3 + 4 = 7</think> 7", None, {}, 1),
    ("format_think", "<think>a\nb</think>\n\n7\n", None, {}, 1),
    ("format_think", "<think> </think> 7", None, {}, 0),
    ("format_think", "<think>a</think> 7 <think>b</think> 8", None, {}, 0),
    ("format_think", "a</think> 7", None, {"opened_by_prompt": True}, 1),
    ("regex_match", "Answer: 12", None, {"pattern": r"^Answer: \d+$"}, 1),
    ("regex_match", "so 12!", None, {"pattern": r"\d+", "full": True}, 0),
]


@pytest.mark.parametrize(("name", "completion", "answer", "kwargs", "expected"), CASES)
def test_a_completion_scores(name: str, completion: str, answer: Any, kwargs: dict[str, Any], expected: float):
    assert score(name, completion, answer, **kwargs) == expected


UNUSABLE = [
    ("exact_match", []),
    ("contains", " "),
    ("number_match", True),
    *[
        (name, answer)
        for name in ("exact_match", "contains", "number_match")
        for answer in (float("nan"), float("inf"), {"x": 1}, {}, [float("nan")], [["5"]], [{"x": 1}], ["5", None])
    ],
]


@pytest.mark.parametrize(("name", "answer"), UNUSABLE)
def test_a_row_without_a_usable_answer_is_an_error_that_names_the_row(name: str, answer: Any):
    with pytest.raises(ValueError, match="row t:0"):
        score(name, "A", answer)


def test_a_completion_near_the_limit_of_length_is_punished_as_in_the_reference() -> None:
    vectors = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
    for length, value in vectors["overlong"]["p"].items():
        sample = RewardSample(completion="", num_tokens=int(length), max_tokens=20480)
        assert soft_overlong(sample, buffer=4096) == pytest.approx(value, abs=1e-6)
        assert soft_overlong(sample) == pytest.approx(value, abs=1e-6), "a fifth of the limit"
