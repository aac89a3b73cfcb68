"""The controller of the adaptive staleness bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.adaptive_staleness.controller import AdaptiveStaleness
from asyncrl_plugins.adaptive_staleness.plugin import AdaptiveStalenessConfig
from learner.loop.trainer import staleness_controllers

MakeConfig = Callable[..., RunConfig]
CALM = (0.99, 0.001)
BETWEEN = (0.94, 0.02)
STORMY = (0.5, 0.2)
NAN = float("nan")


def controller(**limits: float) -> AdaptiveStaleness:
    return AdaptiveStaleness(AdaptiveStalenessConfig.model_validate({"min": 1, "patience": 2} | limits), 4)


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


def test_the_pipeline_has_room_for_the_largest_bound(make_config: MakeConfig) -> None:
    config = make_config(learner={"max_staleness": 5}, algorithm={"adaptive_staleness": {}})
    assert config.groups_in_flight == 6 * config.batch.prompts_per_step
    ((name, made),) = staleness_controllers(config).items()
    assert (name, made.bound) == ("adaptive_staleness", 1)
    assert not staleness_controllers(make_config(learner={"max_staleness": 5}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learner": {"max_staleness": 1}}, "learner.max_staleness, the largest bound, 1"),
        ({"trainer": {"mode": "sync"}}, "learner.max_staleness, the largest bound, 0"),
        ({"rollout": {"top_p": 0.9}}, "do not measure staleness"),
    ],
)
def test_runs_in_which_it_would_say_nothing_are_refused(
    make_config: MakeConfig, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        make_config(**sections, algorithm={"adaptive_staleness": {}})


@pytest.mark.parametrize("limits", [{"ess_low": 0.9, "ess_high": 0.8}, {"kl_high": 0.001}])
def test_limits_in_the_wrong_order_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"must be below algorithm\.adaptive_staleness"):
        AdaptiveStalenessConfig.model_validate(limits)
