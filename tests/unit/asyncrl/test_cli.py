"""The command line: instant where nothing heavy is needed, and every mistake is one message and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.launch.processes import (
    available_cores,
    learner_service,
    server_services,
    service_variables,
)
from asyncrl.plugins import what_to_install
from asyncrl.run_folder.contents import CANDIDATE_FILE, check_run_dir
from asyncrl.run_folder.failure import FAILURE_FILE, RESERVED_FILE
from asyncrl.run_folder.lock import LAUNCHER_LOCK, LEARNER_LOCK

CONFIG = """\
run_dir: {run_dir}
model: {{path: nowhere}}
data: {{train_files: [rows.parquet]}}
reward: {{functions: [{{function: exact_match}}]}}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(run_dir=tmp_path / "run"))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["batch.group_size=4", "--resume", "batch.group_sise=4"],
        ["batch.group_sise=4", "--resume"],
    ],
)
def test_overrides_may_stand_on_either_side_of_an_option(
    config_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """The misspelt key proves that the override was read, wherever it stood."""
    assert main(["train", str(config_file), *arguments]) == 2
    assert "group_sise" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["trian", "x"], ["train", "x", "--bogus"], ["export", "a", "b", "c"], []])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: asyncrl" in capsys.readouterr().err


def test_an_unknown_command_is_refused_with_a_suggestion_and_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["trian"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"there is no command 'trian'. Did you mean 'train'? {what_to_install('commands')}" in said
    for is_whole, says in ((True, "entry point of asyncrl.commands"), (False, "Run `make install` in a checkout")):
        ours = {"x": EntryPoint("x", "asyncrl_plugins.x.plugin:X", "asyncrl.commands")} if is_whole else {}
        monkeypatch.setattr("asyncrl.plugins.find_spec", lambda name, is_whole=is_whole: is_whole or None)
        monkeypatch.setattr("asyncrl.plugins.installed", lambda group, ours=ours: ours)
        assert says in what_to_install("commands")


def test_an_existing_run_directory_is_never_written_into(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    check_run_dir(config.run_path, resume=False)
    (config.run_path / "logs").mkdir(parents=True)
    for name in (LEARNER_LOCK, LAUNCHER_LOCK, RESERVED_FILE, CANDIDATE_FILE, FAILURE_FILE):
        (config.run_path / name).touch()  # of a run that did not begin
    check_run_dir(config.run_path, resume=False)
    (config.run_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="--resume"):
        check_run_dir(config.run_path, resume=False)
    with pytest.raises(UserError, match=r"no journal\.sqlite"):
        check_run_dir(config.run_path, resume=True)
    (config.run_path / JOURNAL_FILE).touch()
    check_run_dir(config.run_path, resume=True)


def test_several_servers_get_a_log_a_port_and_a_failure_file_each(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(rollout={"servers": 3}, telemetry={"rollout_port": 5000})
    services = server_services(config, config.run_path / "config.yaml")
    names = [f"rollout_server-{n}" for n in (1, 2, 3)]
    assert [service.name for service in services] == names
    assert [service.log.name for service in services] == [f"{name}.log" for name in names]
    failures = [str(config.run_path / "logs" / f"{name}.failure.json") for name in names]
    ports = [[], ["telemetry.rollout_port=5001"], ["telemetry.rollout_port=5002"]]
    assert [list(service.command[5:]) for service in services] == [
        ["--failure-file", failure, *port] for failure, port in zip(failures, ports, strict=True)
    ]


def test_a_learner_that_crashed_resumes_once_it_has_a_journal(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    config.run_path.mkdir()
    learner = learner_service(config, tmp_path / "config.yaml", resume=False)
    assert "--resume" not in learner.command
    assert learner.restart_arguments() == ()
    (config.run_path / JOURNAL_FILE).touch()
    assert learner.restart_arguments() == ("--resume",)
    resumed = learner_service(config, tmp_path / "config.yaml", resume=True)
    assert [*resumed.command, *resumed.restart_arguments()].count("--resume") == 1


def test_the_cores_are_shared_half_and_half_unless_the_configuration_says_so() -> None:
    assert service_variables(0)["OMP_NUM_THREADS"] == str(max(1, available_cores() // 2))
    assert service_variables(3)["OMP_NUM_THREADS"] == "3"
    assert service_variables(0, sharing_device=True)["OMP_NUM_THREADS"] == str(available_cores())
