"""The rewards that come with asyncrl, on completions as models write them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.rewards.builtin import BUILTIN_REWARDS
from asyncrl.rewards.sample import RewardSample


def score(name: str, completion: str, answer: Any = None, **kwargs: Any) -> float:
    return BUILTIN_REWARDS[name](RewardSample(completion=completion, answer=answer, row_id="t:0"), **kwargs)


@pytest.mark.parametrize(
    ("completion", "answer", "kwargs", "expected"),
    [
        (" Paris\n", "Paris", {}, 1),
        ("New   York", "New York", {}, 1),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": True}, 1),
        ("7", 7, {}, 1),
        ("cat", ["dog", "cat"], {}, 1),
        ("", "Paris", {}, 0),
    ],
)
def test_exact_match(completion: str, answer: Any, kwargs: dict[str, Any], expected: float):
    assert score("exact_match", completion, answer, **kwargs) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "kwargs", "expected"),
    [
        ("The capital is Paris.", "paris", {}, 1),
        ("The capital is Paris.", "paris", {"ignore_case": False}, 0),
        ("It is 11.", "1", {}, 0),
        ("It is 11.", "1", {"whole_words": False}, 1),
        ("costs 5.00 (net)", "(net)", {}, 1),
        ("a kitten", ["cat", "kitten"], {}, 1),
    ],
)
def test_contains(completion: str, answer: Any, kwargs: dict[str, Any], expected: float):
    assert score("contains", completion, answer, **kwargs) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is 42.", 42, 1),
        ("5-3", 3, 1),  # a minus between numbers is no sign
        ("x = -3", -3, 1),
        ("x = \N{MINUS SIGN}3", -3, 1),
        ("1,234,567 in total", "1234567", 1),
        ("first 3, then 4", "4", 1),
        ("first 4, then 3", "4", 0),
        ("3.5e2", 350, 1),
        (".5", 0.5, 1),
        ("it is 72", "8 * 9 = 72\n#### 72", 1),
        ("1000001", 1000000, 0),  # the tolerance is absolute
        ("no idea", 3, 0),
        ("1,2", 2, 1),
    ],
)
def test_number_match(completion: str, answer: Any, expected: float):
    assert score("number_match", completion, answer) == expected


def test_number_match_tolerances():
    assert score("number_match", "3.33", "3.3333") == 0
    assert score("number_match", "3.33", "3.3333", tolerance=0.01) == 1
    assert score("number_match", "101", 100, relative_tolerance=0.01) == 1
    assert score("number_match", "102", 100, relative_tolerance=0.01) == 0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("B", 1),
        ("b.", 1),
        ("(B)", 1),
        ("The answer is B.", 1),
        ("Answer: **B**", 1),
        ("A dog is shown, so the answer is (B).", 1),
        ("Not (A) but (C)? No: (B)", 1),
        ("\\boxed{B}", 1),
        ("B. a dog", 1),
        ("A dog", 0),
        ("It could be (A) or B", 0),  # parentheses are clearer than a lone letter
        ("I would say C", 0),
        ("no idea", 0),
    ],
)
def test_choice_match(completion: str, expected: float):
    assert score("choice_match", completion, "B") == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so \\boxed{7}", "7", 1),
        ("first \\boxed{6}, then \\boxed{7}", "7", 1),
        ("first \\boxed{7}, then \\boxed{6}", "7", 0),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", 1),
        ("\\boxed{ \\left( 1, 2 \\right) }", "$(1,2)$", 1),
        ("\\boxed{7.0}", "7", 1),
        ("\\boxed{-7}", 7, 0),
        ("\\boxed{\\leftarrow}", "arrow", 0),  # only \left itself is dropped
        ("\\boxed{7", "7", 0),
        ("7", "7", 0),
    ],
)
def test_boxed_match(completion: str, answer: Any, expected: float):
    assert score("boxed_match", completion, answer) == expected


@pytest.mark.parametrize(
    ("completion", "kwargs", "expected"),
    [
        ("<think>3 + 4 = 7</think> 7", {}, 1),
        ("<think>a\nb</think>\n\n7\n", {}, 1),
        ("<think> </think> 7", {}, 0),
        ("<think>a</think> ", {}, 0),
        ("so <think>a</think> 7", {}, 0),
        ("<think>a</think> 7 <think>b</think> 8", {}, 0),
        ("</think>a<think> 7", {}, 0),
        ("a</think> 7", {}, 0),
        ("a</think> 7", {"opened_by_prompt": True}, 1),
    ],
)
def test_format_think(completion: str, kwargs: dict[str, Any], expected: float):
    assert score("format_think", completion, **kwargs) == expected


def test_regex_match():
    assert score("regex_match", "Answer: 12", pattern=r"^Answer: \d+$") == 1
    assert score("regex_match", "so 12!", pattern=r"\d+") == 1
    assert score("regex_match", "so 12!", pattern=r"\d+", full=True) == 0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("exact_match", None),
        ("exact_match", []),
        ("contains", " "),
        ("boxed_match", None),
        ("number_match", "none"),
        ("number_match", True),
        ("choice_match", "E"),
        ("choice_match", "AB"),
    ],
)
def test_a_row_without_a_usable_answer_is_an_error_that_names_the_row(name: str, answer: Any):
    with pytest.raises(ValueError, match="row t:0"):
        score(name, "A", answer)
