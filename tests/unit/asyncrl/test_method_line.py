"""Line that says which method runs, and the notes on schedules that a run is too short for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.explain import method_line, schedule_notes
from asyncrl.config.schema import RunConfig


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({}, "grpo advantages, ppo loss, correction token_tis"),
        (
            {"policy_loss": "gspo", "filters": ["zero_variance"], "updates_per_batch": 4},
            "grpo advantages, gspo loss (clip 0.0003/0.0004, seq-mean-token-mean), filters zero_variance, "
            "correction token_tis, 4 updates",
        ),
        (  # the usual clip is none for this loss
            {"policy_loss": "gspo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"},
            "grpo advantages, gspo loss (clip 0.2/0.28, token-mean), correction token_tis",
        ),
        (
            {"adv_estimator": "gae", "gae": {"lam": 0.95}, "correction": {"masks": [{"kind": "veto"}]}},
            "gae advantages, ppo loss, correction token_tis + veto mask, gae.lam 0.95",
        ),
        (  # an addition or a hook is chosen by its section, which may leave all its keys out
            {"entropy_control": {}},
            "grpo advantages, ppo loss, correction token_tis, with entropy_control",
        ),
    ],
)
def test_a_line_has_the_method_and_all_keys_that_are_not_as_usual(section: dict[str, Any], line: str) -> None:
    config = AlgorithmConfig.model_validate(section)
    assert method_line(config) == line
    assert method_line(AlgorithmConfig.model_validate(config.model_dump(mode="json"))) == line


@pytest.mark.parametrize(
    ("sections", "steps", "key"),
    [
        ({"algorithm": {"adv_estimator": "gae"}, "critic": {"warmup_steps": 10}}, 10, "critic.warmup_steps is 10"),
        ({"learner": {"optim": {"lr_warmup_steps": 20}}}, 20, "learner.optim.lr_warmup_steps is 20"),
        (
            {
                "algorithm": {"adv_estimator": "gae"},
                "critic": {"warmup_steps": 10},
                "learner": {"optim": {"lr_warmup_steps": 20}},
            },
            30,
            "learner.optim.lr_warmup_steps is 20 and the run makes 20 of these",
        ),
    ],
)
def test_a_schedule_that_the_run_is_too_short_for_is_named(
    make_config: Callable[..., RunConfig], sections: dict[str, Any], steps: int, key: str
) -> None:
    config = make_config(**sections)
    (note,) = schedule_notes(config, steps)
    assert key in note
    assert not list(schedule_notes(config, steps + 1))
