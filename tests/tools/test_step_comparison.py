"""The comparison of a step with its repetition: numbers, and weights by their bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.tools.step_comparison import Comparison, Difference, compare_numbers, compare_weights
from learner.training.engines.torch_engine import TorchEngine


def test_on_a_gpu_small_differences_are_told_and_accepted() -> None:
    numbers = compare_numbers({"loss": 0.5, "ess": 1.0, "time": 1.0}, {"loss": 0.5001, "ess": 1.0})
    assert [number.name for number in numbers] == ["loss", "ess"]
    assert not Comparison(1, "cpu", "float32", numbers).is_equal
    on_gpu = Comparison(1, "cuda", "float32", numbers)
    assert on_gpu.is_equal
    assert "within tolerance" in on_gpu.table()
    assert not Comparison(1, "cuda", "float32", compare_numbers({"loss": 0.5}, {"loss": 0.51})).is_equal


def test_numbers_that_are_not_finite_are_compared_as_they_are_recorded() -> None:
    numbers = compare_numbers({"ess": None, "loss": None}, {"ess": float("nan"), "loss": 1.0, "new": 2.0})
    assert [number.size for number in numbers] == [0.0, float("inf"), float("inf")]


def test_tensors_that_are_missing_or_of_another_type_differ() -> None:
    one = torch.ones(2)
    differing = compare_weights({"a": one, "b": one, "d": one}, {"a": one.clone(), "b": one.bfloat16(), "c": one})
    assert {d.name: d.size for d in differing} == {"a": 0.0, "b": float("inf"), "c": float("inf"), "d": float("inf")}
    (nan,) = compare_weights({"a": one}, {"a": one * float("nan")})
    assert nan.size > 0


def _compared(recorded: torch.Tensor, again: torch.Tensor, device: str = "cpu") -> tuple[Any, bool]:
    (found,) = compare_weights({"w": recorded}, {"w": again})
    return found, Comparison(1, device, "float32", (), (found,)).is_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_unit_in_the_last_place_of_one_weight_is_found(dtype: torch.dtype) -> None:
    weights = torch.linspace(-1, 1, 10_000).to(dtype).reshape(100, 100)
    again = weights.clone()
    assert _compared(weights, again) == (Difference("w", None, None, 0.0, 0.0), True)
    bits = again.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[99, 99] += 1
    found, is_equal = _compared(weights, again)
    assert not is_equal
    assert found.size == torch.finfo(dtype).eps


def test_weights_are_compared_by_their_bits() -> None:
    """Not as numbers: NaN would differ from itself, and -0.0 be 0.0."""
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])
    assert _compared(nan, nan.clone()) == (Difference("w", None, None, 0.0, 0.0), True)
    found, is_equal = _compared(zero, torch.tensor([-0.0, 1.0]))
    assert (found.size, found.relative, is_equal) == (math.ulp(0.0), math.ulp(0.0), False)
    assert _compared(zero, torch.tensor([-0.0, 1.0]), "cuda")[1], "within any tolerance"
    found, is_equal = _compared(nan, zero, "cuda")
    assert (found.size, is_equal) == (math.inf, False), "a NaN that came or went is no small difference"
    found, _ = _compared(nan, torch.tensor([float("nan"), 1.5]))
    assert found.size == 0.5, "beside equal NaNs"
    infinite = torch.tensor([math.inf, 1.0])
    assert _compared(infinite, infinite.clone())[1]
    found, is_equal = _compared(infinite, torch.tensor([math.inf, 1.5]), "cuda")
    assert (found.size, is_equal) == (0.5, False), "beside equal infinities"
    assert not _compared(infinite, zero, "cuda")[1]
    assert _compared(torch.tensor(2.0), torch.tensor(2.0))[1], "of no dimension"


@pytest.mark.parametrize("before", [True, False])
def test_a_step_leaves_the_settings_of_torch_as_they_were(make_config: Callable[..., RunConfig], before: bool) -> None:
    filling: Any = torch.utils.deterministic
    seen: list[tuple[bool, bool]] = []

    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory

    number = torch.ones((), requires_grad=True)
    number.register_hook(lambda _: seen.append(settings()))
    config = make_config()
    kept = settings()
    try:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = before
        TorchEngine(config, config.learner.optim, 1).backward(number * 2)
        assert settings() == (before, before)
    finally:
        torch.use_deterministic_algorithms(kept[0])
        filling.fill_uninitialized_memory = kept[1]
    assert seen == [(True, False)]
