"""What an environment in a run's configuration implies, and what does not go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig

LAMP = {"name": "tests/rigs/lamp.py:Lamp"}
MakeConfig = Callable[..., RunConfig]


def test_the_tokens_behind_a_prompt_are_one_number(make_config: MakeConfig) -> None:
    from_data = make_config(environment={**LAMP, "limits": {"tokens_per_turn": 16}}, data={"max_response_length": 96})
    assert from_data.environment.limits.tokens == 96
    values = from_data.model_dump()
    del values["data"]["max_response_length"]
    from_limits = RunConfig.model_validate(values)
    assert from_limits.data.max_response_length == 96
    assert make_config().environment.limits.tokens == 2048, "nothing is implied without an environment"
    with pytest.raises(ValidationError, match="both are the most tokens behind a prompt"):
        make_config(environment={**LAMP, "limits": {"tokens": 600}})


def test_messages_have_room_for_images(make_config: MakeConfig) -> None:
    plain, shown = (
        make_config(data={"max_response_length": 600}, batch={"tokens_per_microbatch": 1024}),
        8 * 5 * 200_704,
    )
    with_images = make_config(
        environment=LAMP, data={"max_response_length": 600}, batch={"tokens_per_microbatch": 1024}
    )
    assert with_images.group_bytes(4) - plain.group_bytes(4) >= 3 * shown


@pytest.mark.parametrize("name", ["turn_return", "gigpo", "mt_grpo"])
def test_credit_over_turns_needs_several(make_config: MakeConfig, name: str) -> None:
    sections: dict[str, Any] = {"data": {"max_response_length": 600}, "batch": {"tokens_per_microbatch": 1024}}
    sections["algorithm"] = {"adv_estimator": name}
    with pytest.raises(ValidationError, match=f"{name} needs trajectories of several turns.*there is no environment"):
        make_config(**sections)
    with pytest.raises(ValidationError, match=f"{name} needs .*environment.limits.turns is 1"):
        make_config(**sections, environment={**LAMP, "limits": {"turns": 1}})
    assert make_config(**sections, environment=LAMP).algorithm.adv_estimator == name


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"environment": {**LAMP, "workers": 1}}, "the 4 trajectories of a group"),
        ({"learner": {"wait_timeout_s": 500.0, "max_staleness": 0}}, "more than half of learner.wait_timeout_s"),
        ({"algorithm": {"noisy_rollout": {"share": 0.5}}}, "algorithm.noisy_rollout.share"),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(
    make_config: MakeConfig, sections: dict[str, Any], says: str
) -> None:
    base = {"environment": LAMP, "data": {"max_response_length": 600}, "batch": {"tokens_per_microbatch": 1024}}
    with pytest.raises(ValidationError, match=says):
        make_config(**{**base, **sections})
