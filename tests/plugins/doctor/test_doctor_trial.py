"""The doctor's trial: a real run, small, that ends in time and leaves nothing unless it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl_plugins.doctor import trial
from tests.rigs.prefork import ForkedProcess, fork_module
from tests.rigs.two_processes import write_config

MakeConfig = Callable[..., RunConfig]


def test_a_trial_differs_in_size_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        data={"max_response_length": 500},
        batch={"prompts_per_step": 8, "tokens_per_microbatch": 4096},
        algorithm={"updates_per_batch": 2},
        network={"host": "192.0.2.1", "insecure": True},
    )
    tiny = trial.smallest(config, tmp_path / "trial")
    assert (tiny.batch.prompts_per_step, tiny.batch.group_size, tiny.data.max_response_length) == (2, 2, 32)
    assert (tiny.data.max_train_rows, tiny.data.max_val_rows, tiny.network.host) == (256, 4, "127.0.0.1")
    for section in ("model", "algorithm", "learner", "rollout", "reward", "alignment", "gpu_memory"):
        assert getattr(tiny, section) == getattr(config, section)
    assert load_config(write_config(tiny, tmp_path / "config")) == tiny


@pytest.mark.slow
def test_a_trial_runs_the_real_thing_and_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(command: list[str], *, stdout: IO[bytes], **_: Any) -> ForkedProcess:
        return fork_module("asyncrl", command[3:], Path(stdout.name), os.environ)

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(trial, "subprocess", SimpleNamespace(Popen=forked, **names))
    file = write_config(make_config(trainer={"mode": "sync"}), tmp_path / "config")
    before = sorted(tmp_path.rglob("*"))
    assert asyncrl(["doctor", str(file), "--json"]) == 0
    found = {finding["what"]: finding["value"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["trial"].startswith("2 steps of 1 x 2 completions")
    assert re.match(r"engine and learner differ by at most \S+ nats a token; 0.001", found["log-prob parity"])
    assert re.match(r"\d finished, \d truncated, 0 failed", found["completions"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_doctor_that_is_interrupted_in_its_trial_stops_it_and_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Launcher(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Launcher)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        list(trial.find_by_trial(make_config()))
    (launcher,) = started
    assert launcher.returncode is not None
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trial_that_takes_too_long_is_stopped(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "BEYOND_START_S", 0.5)
    began = time.monotonic()
    _, late, kept = list(trial.find_by_trial(make_config(network={"start_timeout_s": 0.1})))
    assert time.monotonic() - began < trial.STOP_S
    assert late.verdict == "problem"
    assert late.value.startswith("not done after 0.6 s; last output: ")
    (folder,) = tmp_path.glob("asyncrl-trial-*")
    assert kept.value == f"is kept: {folder}, with trial.log and run/logs"


def test_a_trial_that_goes_wrong_is_kept_and_named(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: RunConfig, folder: Path, deadline_s: float) -> int:
        (folder / trial.LOG).write_text("begins\nerror: none of 2 rows could be scored. Fix the reward\n")
        return 2

    monkeypatch.setattr(trial, "_run", run)
    _, found, kept = list(trial.find_by_trial(make_config()))
    (folder,) = tmp_path.glob("asyncrl-trial-*")
    assert (found.verdict, found.value) == ("problem", "none of 2 rows could be scored")
    assert found.fix == "Fix the reward"
    assert str(folder) in kept.value
    assert found.details == ("begins", "error: none of 2 rows could be scored. Fix the reward")


def test_rewards_that_fail_on_what_the_policy_says_are_a_problem() -> None:
    steps = [{"rows/finished": 1, "rows/error": 3, "reward/mean": 0.5}]
    samples = [{"completions": [{"error": ""}, {"error": "RuntimeError: what is this?"}]}]
    found = trial._completions(steps, samples)
    assert found.verdict == "problem"
    assert found.value == "1 finished, 0 truncated, 3 failed; mean reward 0.5: RuntimeError: what is this?"
    for lost, named in (
        (0, "fix the reward:"),
        (1, "fix the environment and the reward:"),
        (3, "fix the environment:"),
    ):
        assert trial._completions([{**steps[0], "env/errors/environment_died": lost}], samples).fix.startswith(named)
