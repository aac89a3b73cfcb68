"""An environment of functions answers calls, and rewards where its settings name an answer."""

from __future__ import annotations

import pytest

from asyncrl.config.environment import EnvironmentConfig


@pytest.mark.parametrize(("config", "may_reward"), [({}, False), ({"answer": "mine/answer.py:score"}, True)])
def test_tools_reward_where_they_have_an_answer(config: dict[str, str], may_reward: bool) -> None:
    assert EnvironmentConfig.model_validate({"name": "tools", "config": config}).may_reward is may_reward
