"""The comparison of a step with its repetition: numbers, and weights by their bits."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl_plugins.replay.step_comparison import TOLERANCE, Comparison, Difference, compare_numbers, compare_weights

GPU = TOLERANCE["float32"]
NAN, ZERO, INFINITE = (torch.tensor([first, 1.0]) for first in (math.nan, 0.0, math.inf))


def compared(recorded: torch.Tensor, again: torch.Tensor, tolerance: float = 0.0) -> Difference:
    (found,) = compare_weights({"w": recorded}, {"w": again}, tolerance)
    return found


def test_on_a_gpu_small_differences_are_told_and_accepted() -> None:
    recorded, again = {"loss": 0.5, "ess": 1.0, "time": 1.0}, {"loss": 0.5001, "ess": 1.0}
    numbers = compare_numbers(recorded, again)
    assert [(number.name, number.verdict) for number in numbers] == [("loss", "differs"), ("ess", "equal")]
    assert not Comparison(1, 0.0, numbers).is_equal
    on_gpu = Comparison(1, GPU, compare_numbers(recorded, again, GPU))
    assert on_gpu.is_equal
    assert "within tolerance" in on_gpu.table()
    assert compare_numbers({"loss": 0.5}, {"loss": 0.51}, GPU)[0].verdict == "differs"


def test_numbers_that_are_not_finite_are_compared_as_they_are_recorded() -> None:
    numbers = compare_numbers({"ess": None, "loss": None}, {"ess": math.nan, "loss": 1.0, "new": 2.0}, GPU)
    assert [(number.size, number.verdict) for number in numbers] == [
        (0.0, "equal"),
        (math.inf, "differs"),
        (math.inf, "differs"),
    ]


def test_tensors_that_are_missing_or_of_another_type_differ() -> None:
    one = torch.ones(2)
    differing = compare_weights({"a": one, "b": one, "d": one}, {"a": one.clone(), "b": one.bfloat16(), "c": one}, GPU)
    assert {d.name: d.size for d in differing} == {"a": 0.0, "b": math.inf, "c": math.inf, "d": math.inf}
    assert {d.name for d in differing if d.verdict == "differs"} == {"b", "c", "d"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_unit_in_the_last_place_of_one_weight_is_found(dtype: torch.dtype) -> None:
    weights = torch.linspace(-1, 1, 10_000).to(dtype).reshape(100, 100)
    again = weights.clone()
    assert compared(weights, again) == Difference("w", 0.0, "equal")
    bits = again.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[99, 99] += 1
    assert compared(weights, again) == Difference("w", torch.finfo(dtype).eps, "differs")


def test_weights_are_compared_by_their_bits() -> None:
    """Not as numbers: NaN would differ from itself, and -0.0 be 0.0."""
    for one in (NAN, INFINITE, torch.tensor(2.0)):
        assert compared(one, one.clone()).verdict == "equal"
    assert compared(ZERO, -ZERO * torch.tensor([1.0, -1.0])) == Difference("w", math.ulp(0.0), "differs")
    assert compared(ZERO, -ZERO * torch.tensor([1.0, -1.0]), GPU).verdict == "within tolerance"
    for one in (NAN, INFINITE):
        assert compared(one, ZERO, GPU) == Difference("w", math.inf, "differs"), "it came or went: no small difference"
