"""The page of judges and reward models: its snippets are accepted, and it names all settings."""

from __future__ import annotations

import re

import pytest
import yaml

from asyncrl.config.sections import RewardConfig
from asyncrl.rewards.spec import check_rewards, scorer_of
from asyncrl_plugins.judges.judge_settings import JudgeSettings
from asyncrl_plugins.judges.reward_model_settings import RewardModelSettings
from asyncrl_plugins.judges.settings import settings_of
from tests.rigs.tiny import ROOT

PAGE = (ROOT / "asyncrl_plugins" / "judges" / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S))
def test_the_pages_snippets_are_accepted(block: str) -> None:
    config = RewardConfig.model_validate(yaml.safe_load(block)["reward"])
    models = [part for part in config.functions if part.function == "reward_model"]
    for model in models:
        settings_of(model, RewardModelSettings)  # there is no such folder here
    others = tuple(part for part in config.functions if part not in models)
    check_rewards(config.model_copy(update={"functions": others}))
    assert any(scorer_of(part) for part in config.functions)


def test_the_page_names_all_settings() -> None:
    known = {*JudgeSettings.model_fields, *RewardModelSettings.model_fields}
    assert {name for name in known if f"`{name}`" not in PAGE} == set()
