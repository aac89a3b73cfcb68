"""Engines and channels of another package: found by their descriptions, and refused by name where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field, ValidationError

from asyncrl import plugins
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.parts import RolloutEngine
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import Section
from asyncrl.errors import UserError
from rollout_server.engines import create_engine

MakeConfig = Callable[..., RunConfig]


class EchoConfig(Section):
    delay_s: float = Field(default=0.5, ge=0)


def problems(config: RunConfig) -> Iterator[str]:
    if config.model.lora.rank:
        yield "the echo engine has no adapters. Set model.lora.rank=0"


def machine_problems(config: RunConfig) -> list[str]:
    delay_s = config.rollout.settings_of(EchoConfig).delay_s
    return [f"rollout.echo.delay_s is {delay_s:g}, and this machine sleeps at most 9 s"] if delay_s > 9 else []


def echo(config: RunConfig, processor: Any) -> str:
    return f"waits {config.rollout.settings_of(EchoConfig).delay_s:g} s"


ECHO = RolloutEngine(
    implementation=f"{__name__}:echo",
    section=EchoConfig,
    problems=problems,
    machine_problems=f"{__name__}:machine_problems",
)


@pytest.fixture
def installed_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(load=lambda: ECHO, value="echo:ENGINE")
    monkeypatch.setattr(plugins, "installed", lambda group: {"echo": entry} if group == "rollout_engines" else {})
    monkeypatch.setattr(plugins, "description", lambda group, name: plugins.installed(group)[name].load())


@pytest.mark.usefixtures("installed_echo")
def test_another_packages_engine_has_its_settings_rules_and_implementation(
    make_config: MakeConfig, tmp_path: Any
) -> None:
    config = make_config(rollout={"engine": "echo", "echo": {"delay_s": 2}})
    assert create_engine(config, Any) == "waits 2 s"  # pyright: ignore[reportArgumentType]
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    with pytest.raises(ValidationError, match="the echo engine has no adapters"):
        make_config(rollout={"engine": "echo"}, model={"lora": {"rank": 4}})
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        make_config(rollout={"engine": "echo", "echo": {"delay_s": -1}})
    with pytest.raises(UserError, match="sleeps at most 9 s"):
        create_engine(make_config(rollout={"engine": "echo", "echo": {"delay_s": 10}}), Any)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("section", "key", "value", "there"),
    [
        ("rollout", "engine", "sglang", "there is only hf."),
        ("rollout", "weights_channel", "nccl", "auto, shm, zmq"),
        ("learner", "engine", "deepspeed", "torch, fsdp2"),
        ("rollout", "quantization", "fp8", ""),
        ("telemetry", "trackers", ["wandb"], ""),
    ],
)
def test_a_name_whose_plug_in_is_missing_is_refused_with_what_to_install(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: Any, there: str
) -> None:
    monkeypatch.setattr(plugins, "installed", lambda group: {})
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    with pytest.raises(ValidationError) as caught:
        make_config(**{section: {key: value}})
    said = str(caught.value)
    assert f"{section}.{key} is " in said
    assert there in said
    assert "Run `make install` in a checkout, or install the whole wheel" in said


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("acme.plugin:ENGINE", "are of an older version. Run `make install` in a checkout, or install the whole wheel"),
        ("asyncrl_plugins.vllm.plugin:ENGINE", "A plug-in brings another one as an entry point of asyncrl.trackers"),
    ],
)
def test_metadata_of_an_older_installation_are_told_from_a_part_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch, value: str, says: str
) -> None:
    entry = SimpleNamespace(value=value)
    monkeypatch.setattr(plugins, "find_spec", lambda name: name)
    monkeypatch.setattr(plugins, "installed", lambda group: {"one": entry} if group == "rollout_engines" else {})
    assert says in plugins.what_to_install("trackers")
