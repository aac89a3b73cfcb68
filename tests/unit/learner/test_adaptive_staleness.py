"""The controller of `learner.max_staleness: auto`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import AdaptiveStalenessConfig, LearnerConfig
from learner.tickets.adaptive_staleness import AdaptiveStaleness

CALM = (0.99, 0.001)
BETWEEN = (0.94, 0.02)
STORMY = (0.5, 0.2)
NAN = float("nan")


def controller(**limits: float) -> AdaptiveStaleness:
    return AdaptiveStaleness(AdaptiveStalenessConfig.model_validate({"min": 1, "max": 4, "patience": 2} | limits))


def steps_to_move(adaptive: AdaptiveStaleness, measured: tuple[float, float], most: int = 50) -> int:
    return next(number for number in range(1, most + 1) if adaptive.observe(*measured))


def test_calm_raises_the_bound_to_the_largest_and_a_storm_lowers_it_to_the_smallest() -> None:
    adaptive = controller()
    bounds = [adaptive.bound]
    for measured in [CALM] * 40 + [STORMY] * 40:
        if adaptive.observe(*measured):
            bounds.append(adaptive.bound)
    assert bounds == [1, 2, 3, 4, 3, 2, 1]


def test_patience_and_the_time_that_the_pipeline_takes_to_settle() -> None:
    adaptive = controller(patience=3)
    assert steps_to_move(adaptive, CALM) == 3
    assert steps_to_move(adaptive, CALM) == (2 + 1) + 3
    assert steps_to_move(adaptive, STORMY) == (3 + 1) + 3


@pytest.mark.parametrize("interruption", [BETWEEN, STORMY], ids=["between", "stormy"])
def test_only_steps_in_a_row_move_the_bound(interruption: tuple[float, float]) -> None:
    adaptive = controller(patience=3)
    for _ in range(5):
        assert [adaptive.observe(*measured) for measured in (CALM, CALM, interruption)] == [False] * 3
    assert adaptive.bound == 1


@pytest.mark.parametrize(
    ("measured", "bound"),
    [
        ((0.99, 0.02), 3),  # a good sample size alone does not raise it
        ((0.94, 0.001), 3),
        ((0.99, 0.001), 4),
        ((0.5, 0.001), 2),  # one bad measure lowers it
        ((0.99, 0.2), 2),
        ((NAN, NAN), 3),
    ],
)
def test_raising_needs_both_measures_and_lowering_one(measured: tuple[float, float], bound: int) -> None:
    adaptive = controller(patience=1)
    adaptive.restore({"bound": 3, "in_a_row": 0, "settling": 0})
    adaptive.observe(*measured)
    assert adaptive.bound == bound


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=80),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 79),
)
def test_the_bound_stays_within_its_limits_and_survives_a_checkpoint(
    measured: list[tuple[float, float]], smallest: int, patience: int, cut: int
) -> None:
    adaptive = controller(min=smallest, patience=patience)
    other = controller(min=smallest, patience=patience)
    for number, (ess, mismatch_kl) in enumerate(measured):
        if number == cut:
            other = controller(min=smallest, patience=patience)
            other.restore(adaptive.state())
        before = adaptive.bound
        moved = adaptive.observe(ess, mismatch_kl)
        assert smallest <= adaptive.bound <= 4
        assert abs(adaptive.bound - before) == int(moved)
        other.observe(ess, mismatch_kl)
        assert other.state() == adaptive.state()


# --- settings ----------------------------------------------------------------------------------------


def test_auto_counts_with_the_largest_bound(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(learner={"max_staleness": "auto", "adaptive_staleness": {"max": 5}})
    assert config.largest_staleness == 5
    assert config.groups_in_flight == 6 * config.batch.prompts_per_step
    assert make_config(learner={"max_staleness": 3}).largest_staleness == 3


@pytest.mark.parametrize("value", [-1, 1.5, True, "automatic", None])
def test_other_bounds_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="expected a whole number >= 0, or auto"):
        LearnerConfig.model_validate({"max_staleness": value})


@pytest.mark.parametrize("limits", [{"min": 3, "max": 3}, {"ess_low": 0.9, "ess_high": 0.8}, {"kl_high": 0.001}])
def test_limits_in_the_wrong_order_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"must be below learner\.adaptive_staleness"):
        AdaptiveStalenessConfig.model_validate(limits)
