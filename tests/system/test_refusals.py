"""A refused command leaves the run directory, and a run at work in it, as they were."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import RunTakenError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.launch import train as launcher
from asyncrl.launch.ports import free_port
from asyncrl.launch.train import train
from asyncrl.run_folder.contents import CANDIDATE_FILE, next_attempt
from asyncrl.run_folder.failure import read_failure
from asyncrl.run_folder.lock import LAUNCHER_LOCK, LEARNER_LOCK, holder, lock_run
from asyncrl.telemetry.recorder import read_status
from tests.rigs.small_runs import STEPS, logs, save_failure, small
from tests.rigs.two_processes import start, start_command, with_ports, write_config
from tests.rigs.waiting import exit_codes, wait_until

FREE_PORTS = [
    f"{key}_port=0" for key in ("network.control", "network.weights", "telemetry.learner", "telemetry.rollout")
]
MakeConfig = Callable[..., RunConfig]


def contents(run: Path) -> dict[str, bytes]:
    """All but what is said in logs, and locks."""
    files = [file for file in run.rglob("*") if file.is_file() and file.suffix not in (".log", ".lock")]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


@pytest.fixture
def held() -> Iterator[Callable[[Path, str], None]]:
    """Holds a lock as another process would."""
    with ExitStack() as resources:
        yield lambda run, lock: resources.callback(os.close, lock_run(run, lock))


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    """The configuration of a run that stopped."""
    config = make_config()
    config.run_path.mkdir()
    for name in ("config.yaml", JOURNAL_FILE):
        (config.run_path / name).write_text("of before")
    save_failure(config.run_path)
    return config


# --- two launchers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lock", "who"), [(LEARNER_LOCK, "learner"), (LAUNCHER_LOCK, "launcher")])
@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_at_work_is_refused_before_anything_is_looked_at(
    config: RunConfig, held: Callable[[Path, str], None], lock: str, who: str, resume: bool
) -> None:
    held(config.run_path, lock)
    before = contents(config.run_path), sorted(os.listdir(config.run_path))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "nowhere"})})
    with pytest.raises(RunTakenError, match=rf"^another {who} \(process {os.getpid()}\) works in .* another run_dir$"):
        train(config, resume=resume)
    assert (contents(config.run_path), sorted(os.listdir(config.run_path))) == before


@pytest.mark.parametrize("lock", [LEARNER_LOCK, LAUNCHER_LOCK])
def test_who_begins_while_another_launcher_checks_its_configuration_wins(
    config: RunConfig, held: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    monkeypatch.setattr(launcher, "check_inputs", lambda *_: held(config.run_path, lock))
    before = contents(config.run_path)
    with pytest.raises(RunTakenError, match="another"):
        train(config, resume=True)
    assert contents(config.run_path) == before
    assert (holder(config.run_path, LAUNCHER_LOCK) != "") == (lock == LAUNCHER_LOCK), "the loser holds nothing"


@pytest.mark.slow
def test_a_live_run_comes_back_with_its_own_settings_after_another_one_was_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = small(make_config, trainer={"max_steps": 100_000})
    run, file = config.run_path, tmp_path / "config.yaml"
    file.write_text(dump_config(config))

    def steps() -> int:
        return read_status(run).get("step", 0)

    log = tmp_path / "train.log"
    first = start_command("train", str(file), log=log)
    try:
        wait_until(lambda: steps() > 0, "the first step", run / "logs")
        before = (run / "config.yaml").read_bytes(), (run / CANDIDATE_FILE).read_bytes()

        overrides = ["learner.optim.lr=0.009", *FREE_PORTS]
        intruder = start_command("train", str(file), "--resume", *overrides, log=tmp_path / "intruder.log")
        assert intruder.wait(timeout=60) == 2
        assert (tmp_path / "intruder.log").read_text() == (
            f"error: another launcher (process {first.pid}) works in {run}. Wait for its end, stop it, or set another "
            "run_dir\n"
        )
        assert ((run / "config.yaml").read_bytes(), (run / CANDIDATE_FILE).read_bytes()) == before
        assert "error: another" not in (run / "logs" / "learner.log").read_text()

        learner = int((run / LEARNER_LOCK).read_text())
        assert learner in [child.pid for child in psutil.Process(first.pid).children()]
        os.kill(learner, signal.SIGKILL)
        reached = steps() + 2
        wait_until(lambda: steps() >= reached, "two steps of the next learner", run / "logs")
        assert (run / LEARNER_LOCK).read_text() != f"{learner}\n"
        assert yaml.safe_load((run / "config.yaml").read_text())["learner"]["optim"]["lr"] == config.learner.optim.lr
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=60) == 130
    finally:
        first.terminate()  # its children end with it
        first.wait(timeout=60)
    assert not (run / CANDIDATE_FILE).exists()


# --- a finished run ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_stays_finished_whatever_it_is_resumed_with(make_config: MakeConfig, tmp_path: Path) -> None:
    config = small(make_config)
    run, file = config.run_path, tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    log = tmp_path / "train.log"
    assert start_command("train", str(file), log=log).wait(timeout=120) == 0, log.read_text() + logs(run / "logs")
    before = contents(run)

    def resume(*arguments: str) -> tuple[int, str]:
        code = start_command("train", str(run / "config.yaml"), "--resume", *arguments, log=log).wait(timeout=60)
        return code, log.read_text()

    for override, says in (
        ("batch.group_size=2", "batch.group_size was 4, is 2"),
        ("algorithm.updates_per_batch=2", "algorithm.updates_per_batch was 1, is 2"),
        ("trainer.max_steps=2", f"the run is at step {STEPS}, and is to end at step 2. Raise trainer.max_steps"),
    ):
        code, printed = resume(override)
        assert (code, says in printed) == (2, True), printed
        assert contents(run) == before
        assert read_failure(run) is None
        assert next_attempt(config.run_path) == "nothing"

    services = with_ports(config, free_port)
    alone = [start("learner", write_config(services, tmp_path), "--resume", "batch.group_size=2")]
    assert exit_codes(alone, timeout_s=60) == [2]
    assert contents(run) == before, "without a launcher, too"

    began = time.monotonic()
    alone = [start("learner", write_config(services, tmp_path), "--resume")]
    assert exit_codes(alone, timeout_s=60) == [0], "no server is there, and none is needed"
    assert time.monotonic() - began < 30
    assert "nothing is left to do for a server" in (tmp_path / "learner.log").read_text()
    code, printed = resume("learner.optim.lr=0.009")
    assert code == 0, printed
    assert read_status(run)["phase"] == "finished"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert (run / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    assert (run / "export" / "model.safetensors").read_bytes() == before["export/model.safetensors"]
    assert read_failure(run) is None
