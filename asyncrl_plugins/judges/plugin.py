"""Descriptions of the rewards `llm_judge` and `reward_model`."""

from __future__ import annotations

from asyncrl.config.sections import RewardFunctionConfig
from asyncrl.plugins import Reward
from asyncrl_plugins.judges.judge_settings import check_judge
from asyncrl_plugins.judges.reward_model_settings import check_reward_model


def model_of(component: RewardFunctionConfig) -> tuple[str, str]:
    return str(component.kwargs.get("path", "")), str(component.kwargs.get("device", "cpu"))


JUDGE = Reward(
    implementation="asyncrl_plugins.judges.scorer:judge_scorer",
    is_scorer=True,
    check=check_judge,
)
REWARD_MODEL = Reward(
    implementation="asyncrl_plugins.judges.scorer:reward_model_scorer",
    is_scorer=True,
    check=check_reward_model,
    model=model_of,
)
