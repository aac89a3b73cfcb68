"""The choice of the engine with its settings, as files and command lines say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl_plugins.sglang.plugin import SGLangConfig


def test_an_override_that_replaces_the_engine_forgets_its_settings_in_the_file(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(rollout={"engine": "sglang", "sglang": {"python": "there/python"}})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config
    assert load_config(file).rollout.settings_of(SGLangConfig).python == "there/python"
    assert load_config(file, ["rollout.engine=hf"]).rollout.model_extra == {}
    with pytest.raises(UserError, match=r"rollout\.sglang exists only with rollout\.engine=sglang \(it is .*override"):
        load_config(file, ["rollout.engine=hf", "rollout.sglang.python=x"])


def test_an_engine_that_nothing_has_is_refused_with_what_there_is(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine is 'sglan', and there are hf, .*sglang.* 'sglang'\?"):
        make_config(rollout={"engine": "sglan"})
