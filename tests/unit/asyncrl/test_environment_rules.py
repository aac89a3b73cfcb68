"""Settings that an environment in a run's configuration implies, and those that do not go with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.checks.inputs import check_inputs
from asyncrl.config.installed_methods import methods
from asyncrl.config.run_sections import BatchConfig
from asyncrl.config.schema import RunConfig
from asyncrl.data.survey.held_out import conversation_limits, evaluation_ticket
from asyncrl.errors import UserError
from protocol.messages import Prompt

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


def test_settings_of_an_environment_that_has_no_name_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValidationError, match=r"environment\.config has boxes, and environment\.name is empty"):
        make_config(environment={"config": {"boxes": 2}})


def test_a_column_to_order_by_that_no_row_has_is_refused_before_a_run(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"data\.curriculum\.order_by is 'hardness', and no training row has such a"):
        check_inputs(make_config(data={"curriculum": {"order_by": "hardness"}}), "learner")


def test_a_name_that_nothing_has_is_refused_before_rules_of_environments(make_config: MakeConfig) -> None:
    with pytest.raises(ValidationError, match=r"environment\.name is 'lamp', which is unknown") as refused:
        make_config(environment={"name": "lamp", "workers": 1})
    assert "environment.workers" not in str(refused.value)
    with pytest.raises(ValidationError, match=r"environment\.workers x environment\.instances_per_worker is 1"):
        make_config(
            environment={**LAMP, "workers": 1},
            data={"max_response_length": 600},
            batch={"group_size": 8, "tokens_per_microbatch": 1024},
        )


def test_defaults_of_an_environment_and_of_groups_go_together(make_config: MakeConfig) -> None:
    group_size = BatchConfig.model_fields["group_size"].default
    batch = {"group_size": group_size, "tokens_per_microbatch": 4096}
    config = make_config(environment=LAMP, batch=batch, data={"max_response_length": 600})
    assert config.environment.capacity >= group_size


def test_messages_have_room_for_images(make_config: MakeConfig) -> None:
    plain, shown = (
        make_config(data={"max_response_length": 600}, batch={"tokens_per_microbatch": 1024}),
        8 * 5 * 200_704,
    )
    with_images = make_config(
        environment=LAMP, data={"max_response_length": 600}, batch={"tokens_per_microbatch": 1024}
    )
    assert with_images.group_bytes(4) - plain.group_bytes(4) >= 3 * shown


def test_held_out_rows_may_have_limits_of_their_own(make_config: MakeConfig) -> None:
    sections: dict[str, Any] = {"data": {"max_response_length": 96}}
    environment = {**LAMP, "limits": {"tokens_per_turn": 16, "turns": 3, "images": 2}}
    config = make_config(
        **sections, environment=environment, evaluation={"limits": {"turns": 12, "tokens": 400, "images": 0}}
    )
    held_out = conversation_limits(config.environment, config.evaluation_limits)
    trained = conversation_limits(config.environment, config.environment.limits)
    assert held_out is not None
    assert trained is not None
    assert (held_out.turns, held_out.tokens_per_turn, held_out.images) == (12, 16, 0)
    assert (trained.turns, trained.images) == (3, 2)
    assert (config.longest_completion, config.data.max_response_length) == (400, 96)
    asked = Prompt(row_id="r", messages=())
    ticket = evaluation_ticket(
        config.evaluation,
        config.environment,
        asked,
        0,
        ticket_id=0,
        version=0,
        run_seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
        stop_token_ids=(1,),
        banned_token_ids=(),
    )
    assert (ticket.sampling.max_new_tokens, ticket.conversation) == (400, held_out)
    assert config.group_bytes(4, is_held_out=True) < config.group_bytes(4), "an image is more than 304 tokens"
    for given, problem in (
        ({"tokens_per_turn": 97}, "97 tokens in a turn and 96 in all"),
        ({"tokens": 8}, "16 tokens"),
    ):
        with pytest.raises(ValidationError, match=problem):
            make_config(**sections, environment=environment, evaluation={"limits": given})
    with pytest.raises(ValidationError, match=r"evaluation\.limits has turns, and there is no environment"):
        make_config(evaluation={"limits": {"turns": 12}})


@pytest.mark.parametrize("name", [name for name, method in methods("advantage").items() if "turns" in method.needs])
def test_credit_over_turns_needs_several(make_config: MakeConfig, name: str) -> None:
    sections: dict[str, Any] = {"data": {"max_response_length": 600}, "batch": {"tokens_per_microbatch": 1024}}
    sections["algorithm"] = {"adv_estimator": name}
    with pytest.raises(ValidationError, match=f"{name} needs trajectories of several turns.*there is no environment"):
        make_config(**sections)
    with pytest.raises(ValidationError, match=f"{name} needs .*environment.limits.turns is 1"):
        make_config(**sections, environment={**LAMP, "limits": {"turns": 1}})
    assert make_config(**sections, environment=LAMP).algorithm.adv_estimator == name


NOTHING = {"functions": []}
ROOM: dict[str, Any] = {"data": {"max_response_length": 600}, "batch": {"tokens_per_microbatch": 1024}}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "reward.functions is empty: no trajectory would have a reward. Name a function"),
        (LAMP, ""),
    ],
)
def test_a_run_has_a_reward_function_or_an_environment_that_rewards(
    make_config: MakeConfig, environment: dict[str, Any], says: str
) -> None:
    config = make_config(**ROOM, environment=environment, reward=NOTHING)
    with pytest.raises(UserError, match=re.escape(says)) if says else nullcontext():
        check_inputs(config, "learner", "rollout_server")
    check_inputs(make_config(**ROOM, environment=environment), "learner", "rollout_server")


def test_what_asks_for_components_is_refused_where_the_environment_alone_rewards(make_config: MakeConfig) -> None:
    for section, values in (
        ("algorithm", {"adv_estimator": "gdpo"}),
        ("algorithm", {"filters": ["zero_variance"], "zero_variance": {"component": "right"}}),
        ("reward", {**NOTHING, "accuracy": "right"}),
    ):
        with pytest.raises(ValidationError, match=r"reward\.functions"):
            make_config(**{**ROOM, "environment": LAMP, "reward": NOTHING, section: values})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"environment": {**LAMP, "workers": 1}}, "the 4 trajectories of a group"),
        ({"learner": {"wait_timeout_s": 500.0, "max_staleness": 0}}, "more than half of learner.wait_timeout_s"),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(
    make_config: MakeConfig, sections: dict[str, Any], says: str
) -> None:
    base = {"environment": LAMP, "data": {"max_response_length": 600}, "batch": {"tokens_per_microbatch": 1024}}
    with pytest.raises(ValidationError, match=says):
        make_config(**{**base, **sections})
