"""Settings of the demo of pictures, which are checked before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.demo.choice import DemoRequest
from asyncrl.errors import UserError
from asyncrl_plugins.demos import llm
from asyncrl_plugins.demos.vqa import demo


@pytest.mark.parametrize("change", ["run_dir=elsewhere", "model.path=elsewhere", "evaluation.before_training=false"])
def test_a_change_of_the_demos_own_settings_is_refused_at_once(tmp_path: Path, change: str) -> None:
    with pytest.raises(UserError, match=r"as (they are|it is)"):
        demo(DemoRequest(changes=[change], folder=tmp_path / "demo"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", [demo, llm.demo], ids=["vqa", "llm"])
def test_a_demo_that_could_not_score_its_export_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[DemoRequest], None]
) -> None:
    monkeypatch.setattr("asyncrl_plugins.demos.packages.installed", lambda group: {"compose": None})
    with pytest.raises(UserError, match="the demo needs `asyncrl eval`, which is not installed"):
        run(DemoRequest(folder=tmp_path / "demo"))
    assert not list(tmp_path.iterdir())
