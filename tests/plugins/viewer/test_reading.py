"""Commands that only look at a run whose files cannot be read: one line that names the file, and a fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config.schema import RunConfig
from asyncrl_plugins.viewer.inspect import __main__ as inspect
from asyncrl_plugins.viewer.recorded_run.run import recorded_method_line
from asyncrl_plugins.viewer.report.page import page_of
from asyncrl_plugins.viewer.report.reading import SIGNS, read_run
from tests.plugins.viewer.made_up_samples import MadeUpStore
from tests.rigs import made_up_run as made
from tests.rigs.shown_run import check_told, close_off, write_configured_run

COMMANDS: dict[str, Callable[[str], int]] = {
    "inspect": lambda run: inspect.main([run]),
    "watch": lambda run: cli.main(["watch", run]),
    "report": lambda run: cli.main(["report", run]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("closed", ["run", "run/grpo"])
def test_a_folder_that_cannot_be_looked_into_may_hold_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, closed: str
) -> None:
    run = tmp_path / "run" / "grpo"
    run.mkdir(parents=True)
    close_off(tmp_path / closed)
    assert COMMANDS[command](str(run)) == 2
    said = capsys.readouterr().err
    (name,) = [name for name in ("config.yaml", *SIGNS) if f"{name}:" in said]
    check_told(said, run / name)


@pytest.mark.parametrize("command", COMMANDS)
def test_where_there_is_no_run_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    for run in (tmp_path, tmp_path / "nowhere"):
        assert COMMANDS[command](str(run)) == 2
        assert capsys.readouterr().err.startswith("error: there is no ")


def test_inspect_names_the_groups_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It meets them late: the journal itself can be read."""
    store = MadeUpStore()
    groups = tmp_path / "journal.sqlite.groups-000001"
    close_off(groups)
    monkeypatch.setattr(store, "detail", lambda ticket_id: groups.open())
    monkeypatch.setattr(inspect, "SampleStore", lambda run_dir: store)
    assert inspect.main([str(tmp_path), "--ticket", "1"]) == 2
    check_told(capsys.readouterr().err, groups)


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"])
def test_watch_names_what_it_cannot_read(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = write_configured_run(make_config())
    close_off(run / name)
    assert COMMANDS["watch"](str(run)) == 2
    check_told(capsys.readouterr().err, run / name)


def test_a_report_says_which_files_it_could_not_read(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run")
    names = (
        *("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "timeline.jsonl"),
        *("config.yaml", "environment.json", "failure.json"),
    )
    for name in names:
        close_off(run / name)
    read = read_run(run)
    page = page_of(read)
    for name in names:
        says = f"{name} cannot be read (Too many levels of symbolic links)"
        assert any(sentence.startswith(says) for sentence in read.missing)
        assert says in page
        assert f"There is no {name}:" not in page


def test_a_section_of_another_version_has_no_line() -> None:
    assert [recorded_method_line(section) for section in (None, {"no_such_key": 1}, [])] == ["", "", ""]
