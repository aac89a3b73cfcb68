"""The doctor's trial: a real run, small, that ends in time and leaves nothing unless it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.tools.doctor import trial
from asyncrl.tools.doctor.examine import Examination, terminated_as_interrupted
from asyncrl.tools.doctor.findings import Finding
from tests.rigs.two_processes import write_config
from tests.rigs.waiting import wait_until

MakeConfig = Callable[..., RunConfig]


def test_a_trial_differs_in_size_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        data={"max_response_length": 500, "filter_overlong_prompts": True},
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
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(make_config(trainer={"mode": "sync"}), tmp_path / "config")
    before = sorted(tmp_path.rglob("*"))
    assert asyncrl(["doctor", str(file), "--json"]) == 0
    found = {finding["what"]: finding["value"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["trial"].startswith("2 steps of 1 x 2 completions")
    assert re.match(r"engine and learner differ by at most \S+ nats a token; 0.001", found["log-prob parity"])
    assert re.match(r"0.\d MiB written in \S+ s, over shm in \S+ s, into the engine in \S+ s", found["weight push"])
    assert found["sleep and wake"].endswith("computes the same as before")
    assert re.match(r"\d finished, \d truncated, 0 failed", found["completions"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_trial_whose_findings_cannot_be_printed_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Its reader goes away after any of its findings."""
    monkeypatch.setattr(trial, "_run", lambda *_: 0)
    monkeypatch.setattr(trial, "find_in_run", lambda _: iter([Finding("completions", "none", "problem")]))
    config, reported = make_config(), []
    before = sorted(tmp_path.rglob("*"))

    def report(finding: Finding) -> None:
        reported.append(finding)
        if len(reported) == last:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Examination(report).run("trial", trial.find_by_trial(config))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_doctor_that_is_terminated_in_its_trial_leaves_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    file = write_config(make_config(), tmp_path / "config")
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "asyncrl", "doctor", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout is not None
        assert any("a real run of 2 tiny steps begins" in line for line in doctor.stdout)
        wait_until(lambda: any(log.stat().st_size for log in tmp_path.rglob("learner.log")), "the trial's learner")
        doctor.terminate()
        assert doctor.wait(timeout=300) == 130
        assert doctor.stderr is not None
        assert "Traceback" not in doctor.stderr.read()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_doctor_that_is_terminated_twice_ends_after_its_trial() -> None:
    """The second time while its launcher, which hears of it as well, stops the services."""
    launcher = """
import os, signal, time
terms = []
def stop(*_):
    terms.append(1)
    if len(terms) == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    else:
        raise SystemExit(7)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(KeyboardInterrupt), terminated_as_interrupted(), trial._ended(process):
                raise KeyboardInterrupt
            assert process.poll() == 7
        finally:
            process.kill()


def test_a_trial_that_takes_too_long_is_stopped(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "BEYOND_START_S", 0.5)
    began = time.monotonic()
    _, late = list(trial.find_by_trial(make_config(network={"start_timeout_s": 0.1})))
    assert time.monotonic() - began < trial.STOP_S
    assert late.verdict == "problem"
    assert late.value.startswith("not done after 0.6 s; it said last: ")
    (folder,) = tmp_path.glob("asyncrl-trial-*")
    assert late.fix == f"look into {folder}: trial.log and run/logs"


@pytest.mark.slow
def test_a_trial_that_goes_wrong_is_kept_and_named(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that only fails on what a policy says."""
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def score(sample):\n    if sample.completion in ('', sample.answer, sample.columns['target']):\n"
        "        return 1.0 * len(sample.completion)\n    raise RuntimeError('what is this?')\n"
    )
    config = make_config(reward={"functions": [{"function": f"{reward}:score"}]})
    assert asyncrl(["doctor", str(write_config(config, tmp_path / "config"))]) == 1
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("PROBLEM")]
    assert re.match(r"PROBLEM \S+ .*RuntimeError: what is this\? \(my_reward.py:4 in score\).*\. Fix: \S+", line), (
        printed
    )
    (folder,) = tmp_path.glob("asyncrl-trial-*")
    assert str(folder) in printed
    assert (folder / "trial.log").is_file()
