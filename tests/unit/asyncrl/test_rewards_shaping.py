"""Entries of `reward.functions` that shape another component, or compare a group: what is refused of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asyncrl.config.sections import RewardConfig
from asyncrl.errors import UserError
from asyncrl.rewards.spec import check_rewards

RIGHT = {"function": "exact_match", "name": "right"}


def reward_config(*functions: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"functions": functions, "workers": 1})


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{"function": "cosine_length", "shapes": "right"}, RIGHT], "shapes 'right', which is no component above it"),
        ([{"function": "cosine_length", "shapes": "sum"}], "shapes the sum of the components above it, and there are"),
        (
            [{**RIGHT, "weight": 0.9}, {"function": "cosine_length", "shapes": "right"}],
            "so the weight of 'right' would be lost: give it to 'cosine_length'",
        ),
        (
            [RIGHT, *({"function": name, "shapes": "right"} for name in ("cosine_length", "stop_properly"))],
            "'stop_properly' shapes 'right', which is no component above it that still counts in the sum: it can shape "
            "cosine_length, sum",
        ),
    ],
)
def test_what_cannot_be_shaped_is_refused(functions: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        reward_config(*functions)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([RIGHT, {"function": "contains", "shapes": "right"}], "takes no score of another component. Remove `shapes`"),
        ([{"function": "contains", "group": True}], "scores one completion at a time. Remove `group`"),
    ],
)
def test_a_function_that_does_not_fit_its_entry_is_refused(functions: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rewards(reward_config(*functions))
