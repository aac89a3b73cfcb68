"""Secrets of the user's own code: files of a run and trackers have `env:NAME`, and the code has the value."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.config.secrets import secret_notes, with_secrets
from asyncrl.config.sections import RewardConfig
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.loading import load, source_of
from asyncrl.errors import UserError
from asyncrl.journal.writer import Journal
from asyncrl.rewards.worker import _load, _score
from asyncrl.run_folder.contents import save_config

VALUE = "sk-the-value-itself"
ENVIRONMENT = """
from pydantic import BaseModel

class Search:
    class Config(BaseModel):
        env: dict[str, str] = {}
        headers: list[dict[str, str]] = []
        port: int = 0

    def reset(self, start): ...
    def step(self, action): ...
"""
REWARD = "def keyed(sample, key):\n    return float(key == 'sk-the-value-itself')\n"


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", VALUE)


def made(make_config: Callable[..., RunConfig], tmp_path: Path, settings: dict[str, Any]) -> RunConfig:
    file = tmp_path / "search.py"
    file.write_text(ENVIRONMENT)
    limits = {"tokens_per_turn": 8}
    return make_config(environment={"name": f"{file}:Search", "config": settings, "limits": limits})


def settings_of(config: RunConfig) -> Any:
    section = config.environment
    return asyncio.run(load(section.name, section.config, source_of(section), ImageRule())).config


def test_an_environment_has_the_value_and_the_configuration_the_name(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    given = {"env": {"KEY": "env:SEARCH_KEY", "MODE": "env: none"}, "headers": [{"auth": "env:SEARCH_KEY"}]}
    config = made(make_config, tmp_path, given)
    settings = settings_of(config)
    assert settings.env == {"KEY": VALUE, "MODE": "env: none"}
    assert settings.headers == [{"auth": VALUE}]
    assert VALUE not in dump_config(config)
    assert VALUE not in json.dumps(config.model_dump(mode="json")), "what trackers get"
    file = save_config(tmp_path / "run", dump_config(config))
    assert load_config(file, []).environment.config == given, "a resumed run asks for it again"


def test_a_reward_has_the_value(tmp_path: Path) -> None:
    entry = {"name": "keyed", "function": "keyed", "kwargs": {"key": "env:SEARCH_KEY"}, "path": f"{tmp_path}/r.py"}
    entry |= {"package": "", "source": REWARD.encode(), "group": False, "shapes": {}}
    _, serve = _load({"components": [entry]})
    (components,) = serve.args  # pyright: ignore[reportFunctionMemberAccess]
    request = {"id": 1, "row": {}, "completions": [{"completion": "x"}], "scores": [{}], "components": ["keyed"]}

    class Heard:
        def send(self, message: dict[str, Any]) -> None: ...

    assert _score(request, components, Heard())["scores"][0]["components"] == {"keyed": 1.0}  # pyright: ignore


@pytest.mark.parametrize("setting", ["env.KEY", "headers.0.auth"])
def test_a_variable_that_is_not_there_is_named_with_its_key(
    make_config: Callable[..., RunConfig], tmp_path: Path, setting: str
) -> None:
    given = {"env": {"KEY": "env:NOT_THERE"}} if setting == "env.KEY" else {"headers": [{"auth": "env:NOT_THERE"}]}
    with pytest.raises(UserError, match=rf"environment\.config\.{setting} is 'env:NOT_THERE'.* variable NOT_THERE"):
        settings_of(made(make_config, tmp_path, given))


def test_an_error_of_a_setting_does_not_tell_its_value(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.config\.port is 'env:SEARCH_KEY'") as refused:
        settings_of(made(make_config, tmp_path, {"port": "env:SEARCH_KEY"}))
    assert VALUE not in str(refused.value)


def test_what_looks_like_a_secret_is_noted(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    given = {"env": {"API_KEY": "sk-1", "AUTH_TOKEN": "env:SEARCH_KEY"}, "tools": [{"db_password": "x"}]}
    other = {"eos_token": "</s>", "max_tokens": "5", "key": "row", "api_key": ""}
    config = made(make_config, tmp_path, given | other)
    reward = RewardConfig.model_validate({"functions": [{"function": "exact_match", "kwargs": {"api_key": "sk-2"}}]})
    note, *others = secret_notes(config.environment, reward)
    assert "environment.config.env.API_KEY looks like a secret" in note
    named = [one.partition(" ")[0] for one in others]
    assert named == ["environment.config.tools.0.db_password", "reward.functions.0.kwargs.api_key"]
    assert "env:API_KEY" in note
    assert "sk-1" not in note


def test_files_that_have_the_settings_are_their_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / "config.yaml").write_text("older, for all to read")
        files = [save_config(tmp_path, "a: 1\n"), save_config(tmp_path, "a: 1\n", ".config.candidate.yaml")]
        with closing(Journal(tmp_path / "journal.sqlite")) as journal:
            journal.set_meta(settings="{}")
            files += [file for file in tmp_path.glob("journal.sqlite*") if not file.name.endswith(".commits")]
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}, files
    finally:
        os.umask(before)


def test_values_are_copied_and_left_as_they_are() -> None:
    given = {"a": (1, "env:SEARCH_KEY"), "b": None, "c": {"d": [True, 0.5]}}
    assert with_secrets(given, "s") == {"a": [1, VALUE], "b": None, "c": {"d": [True, 0.5]}}
    assert given["a"] == (1, "env:SEARCH_KEY")
