"""`asyncrl replay` of a run whose files cannot be read: one line that names the file, and a fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.replay import replay
from tests.rigs.shown_run import check_told, close_off, write_configured_run


@pytest.mark.parametrize("closed", ["run", "run/grpo"])
def test_a_folder_that_cannot_be_looked_into_may_hold_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: str
) -> None:
    run = tmp_path / "run" / "grpo"
    run.mkdir(parents=True)
    close_off(tmp_path / closed)
    assert replay.main([str(run), "--step", "1"]) == 2
    check_told(capsys.readouterr().err, run / "journal.sqlite")


def test_where_there_is_no_run_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (tmp_path, tmp_path / "nowhere"):
        assert replay.main([str(run), "--step", "1"]) == 2
        assert capsys.readouterr().err.startswith("error: there is no ")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_it_names_what_it_cannot_read(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = write_configured_run(make_config())
    close_off(run / name)
    assert replay.main([str(run), "--step", "1"]) == 2
    check_told(capsys.readouterr().err, run / name)
