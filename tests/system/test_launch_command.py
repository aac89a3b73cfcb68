"""The command line: instant where nothing heavy is needed, and every mistake is one message and exit code 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.ports import reserve_ports
from asyncrl.launch.processes import JOURNAL_FILE, learner_service, server_services
from asyncrl.launch.train import check_run_dir, write_candidate

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


def make(tmp_path: Path, **ports: int) -> RunConfig:
    zeros = {"control_port": 0, "weights_port": 0, "learner_port": 0, "rollout_port": 0, **ports}
    return RunConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "nowhere"},
            "data": {"train_files": ["rows.parquet"]},
            "reward": {"functions": [{"function": "exact_match"}]},
            "network": {key: zeros[key] for key in ("control_port", "weights_port")},
            "telemetry": {key: zeros[key] for key in ("learner_port", "rollout_port")},
        }
    )


def ports_of(config: RunConfig) -> list[int]:
    network, telemetry = config.network, config.telemetry
    return [network.control_port, network.weights_port, telemetry.learner_port, telemetry.rollout_port]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--help"], "--dry-run"),
        (["--version"], "."),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["learn", "{config}", "batch.group_sise=4"], "batch.group_size"),
        (["rollout", "{config}", "batch.group_sise=4"], "batch.group_size"),
    ],
)
def test_help_and_mistakes_in_the_configuration_load_nothing_heavy(
    config_file: Path, arguments: list[str], told: str
) -> None:
    code = (
        "import sys\nfrom asyncrl.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *(word.format(config=config_file) for word in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert told in done.stdout + done.stderr


def test_an_unknown_key_is_a_message_with_a_suggestion(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "batch.group_sise=4"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "batch.group_size" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resume", "batch.group_sise=4"],
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


def test_a_mistake_leaves_nothing_behind(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file)]) == 2
    assert "model.path" in capsys.readouterr().err
    assert [path.name for path in config_file.parent.iterdir()] == ["config.yaml"]


def test_an_existing_run_directory_is_never_written_into(tmp_path: Path) -> None:
    config = make(tmp_path)
    check_run_dir(config, resume=False)
    config.run_path.mkdir()
    check_run_dir(config, resume=False)
    (config.run_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="--resume"):
        check_run_dir(config, resume=False)
    with pytest.raises(UserError, match=r"no journal\.sqlite"):
        check_run_dir(config, resume=True)
    (config.run_path / JOURNAL_FILE).touch()
    check_run_dir(config, resume=True)


def test_the_launcher_knows_the_journal_by_the_name_that_the_learner_gives_it() -> None:
    from asyncrl.journal import writer as journal

    assert journal.JOURNAL_FILE == JOURNAL_FILE


def test_zeros_become_four_different_free_ports(tmp_path: Path) -> None:
    with reserve_ports(make(tmp_path)) as config:
        ports = ports_of(config)
    assert len(set(ports)) == 4
    assert all(ports)


def test_a_fixed_port_is_kept_and_a_busy_one_is_refused_by_name(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        busy = holder.getsockname()[1]
        with pytest.raises(UserError, match=r"telemetry\.rollout_port") as caught:
            reserve_ports(make(tmp_path, rollout_port=busy)).__enter__()
    assert str(busy) in str(caught.value)
    with reserve_ports(make(tmp_path, rollout_port=busy)) as config:
        assert ports_of(config)[3] == busy


def test_one_port_for_two_purposes_is_refused_rather_than_changed(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with pytest.raises(UserError, match=r"network\.control_port and telemetry\.learner_port are both"):
        reserve_ports(make(tmp_path, control_port=free, learner_port=free)).__enter__()


def test_both_services_read_the_same_resolved_configuration(tmp_path: Path) -> None:
    from asyncrl.config.load import load_config

    with reserve_ports(make(tmp_path)) as config:
        assert load_config(write_candidate(config)) == config


def test_several_servers_get_a_log_a_port_and_a_share_of_the_cores_each(tmp_path: Path) -> None:
    config = make(tmp_path).model_copy(update={"rollout": RolloutConfig(servers=3)})
    with reserve_ports(config) as resolved:
        config = resolved
    first = config.telemetry.rollout_port
    assert not {first + 1, first + 2} & set(ports_of(config))
    services = server_services(config, tmp_path / "config.yaml")
    assert [service.name for service in services] == [f"rollout_server-{n}" for n in (1, 2, 3)]
    assert [service.log.name for service in services] == [f"rollout_server-{n}.log" for n in (1, 2, 3)]
    failures = [str(service.log.with_suffix(".failure.json")) for service in services]
    assert [str(service.failure) for service in services] == failures
    assert [list(service.command[5:]) for service in services] == [
        ["--failure-file", failures[0]],
        ["--failure-file", failures[1], f"telemetry.rollout_port={first + 1}"],
        ["--failure-file", failures[2], f"telemetry.rollout_port={first + 2}"],
    ]


def test_the_ports_after_a_fixed_one_must_be_free_for_the_further_servers(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        busy = holder.getsockname()[1]
        config = make(tmp_path, rollout_port=busy - 1).model_copy(update={"rollout": RolloutConfig(servers=2)})
        with pytest.raises(UserError, match=r"rollout_port \+ 1 \(rollout\.servers\)|rollout_port to another"):
            reserve_ports(config).__enter__()


def test_a_learner_that_crashed_resumes_once_it_has_a_journal(tmp_path: Path) -> None:
    config = make(tmp_path)
    config.run_path.mkdir()
    learner = learner_service(config, tmp_path / "config.yaml", resume=False)
    assert "--resume" not in learner.command
    assert learner.when_again() == ()
    (config.run_path / JOURNAL_FILE).touch()
    assert learner.when_again() == ("--resume",)
    resumed = learner_service(config, tmp_path / "config.yaml", resume=True)
    assert [*resumed.command, *resumed.when_again()].count("--resume") == 1


def test_config_reference_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config-reference"]) == 0
    printed = capsys.readouterr().out
    for key in ("learner.max_staleness", "batch.group_size", "telemetry.learner_port"):
        assert key in printed
