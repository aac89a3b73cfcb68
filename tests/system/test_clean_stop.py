"""A run that is stopped has a checkpoint of its last step; one that is killed repeats its steps once, not each time."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.recorder import read_status
from learner.loop.checkpoint import newest_checkpoint, read_state
from learner.training_loop import FEW_STEPS
from protocol.device_lock import read_tenure
from tests.rigs.prefork import Service
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow
STEPS = 16


def stoppable(make_config: Callable[..., RunConfig], run: Path, **sections: Any) -> tuple[RunConfig, Path]:
    """A run whose steps take about a tenth of a second, with no checkpoint planned."""
    engine = {"engine": "scripted", "engine_args": {"mean_length": 6, "seconds_per_token": 0.01}}
    config = small(make_config, **{"rollout": engine, **sections})
    config = with_ports(config.model_copy(update={"run_dir": str(run)}))
    return config, write_config(config, run.parent)


def steps_of(run: Path) -> int:
    return int(read_status(run).get("step") or 0)


def recorded_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def saved_step(run: Path) -> int:
    folder = newest_checkpoint(run)
    return read_state(folder).step if folder else 0


class Attempts:
    """Learner and server, again and again."""

    def __init__(self, file: Path, run: Path):
        self._file, self._run = file, run
        self.services: list[Service] = []

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self.services:
            service.kill()
            service.wait()

    def begin(self, *arguments: str, slow_at: str = "") -> Service:
        for service in self.services[-1:]:
            service.wait(timeout=30)  # the last one's server
        learner = start("learner", self._file, *arguments, slow_at=slow_at)
        self.services += [learner, start("rollout_server", self._file)]
        return learner

    def at_step(self, step: int) -> None:
        wait_until(lambda: steps_of(self._run) >= step, f"step {step}", self._file.parent)


def test_a_signal_leaves_a_checkpoint_of_the_last_step_and_a_kill_repeats_its_steps_once(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "learner.log"
    _, file = stoppable(make_config, run, trainer={"max_steps": STEPS})
    with Attempts(file, run) as attempts:
        learner = attempts.begin()
        attempts.at_step(2)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=30) == 130, logs(tmp_path)
        stopped_at = saved_step(run)
        assert stopped_at == recorded_steps(run)[-1] >= 2
        assert read_status(run)["phase"] == "interrupted"
        assert attempts.services[-1].wait(timeout=30) == 4, "the server waits for the next learner"

        learner = attempts.begin("--resume")
        attempts.at_step(killed_at := stopped_at + FEW_STEPS + 2)
        learner.kill()
        learner.wait()
        attempts.services[-1].kill()
        assert "making steps" not in log.read_text(), "it began at the checkpoint of the stop"
        assert saved_step(run) == stopped_at

        learner = attempts.begin("--resume", slow_at="checkpoint.writing:30")  # the stop comes while it is written
        again = wait_for_line(log, rf"making steps {stopped_at + 1} to (\d+) again")
        attempts.at_step(int(again))
        assert int(again) >= killed_at
        learner.send_signal(signal.SIGINT)
        wait_for_line(log, rf"(stopping after step {again})")
        learner.send_signal(signal.SIGINT)
        assert learner.wait(timeout=10) == 130, logs(tmp_path)
        assert "has no checkpoint: the next start makes the steps" in log.read_text(), "a second signal ends at once"
        assert saved_step(run) == stopped_at
        attempts.services[-1].kill()  # it may not have met this learner, and then waits for the next one

        learner = attempts.begin("--resume")
        again = wait_for_line(log, rf"making steps {stopped_at + 1} to (\d+) again[^$]*making steps \d+ to (\d+)", 2)
        wait_until(lambda: saved_step(run) == int(again), "the checkpoint after repeated steps", tmp_path)
        assert learner.wait(timeout=60) == 0, logs(tmp_path)
    assert_every_prompt_trained_once(run, STEPS)
    assert recorded_steps(run) == list(range(1, STEPS + 1))


def wait_for_line(log: Path, pattern: str, group: int = 1) -> str:
    found: list[re.Match[str]] = []

    def is_there() -> bool:
        found.extend(re.finditer(pattern, log.read_text()))
        return bool(found)

    wait_until(is_there, pattern, log.parent)
    return found[-1][group]


def test_ranks_that_share_their_device_are_stopped_while_the_server_has_it(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The server's turn would last for minutes: it is not waited for."""
    run = tmp_path / "run"
    _, file = stoppable(
        make_config,
        run,
        learner={"engine": "fsdp2", "num_processes": 2},
        trainer={"mode": "sync", "max_steps": STEPS},
        rollout={"engine": "scripted", "engine_args": {"mean_length": 6, "seconds_per_token": 0.1}},
    )
    with Attempts(file, run) as attempts:
        learner, server = attempts.begin(), attempts.services[-1]
        attempts.at_step(1)
        wait_until(lambda: has_device(run, server.pid), "the server's next turn", tmp_path, poll_s=0.005)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=30) == 130, logs(tmp_path)
        assert server.wait(timeout=30) == 4, logs(tmp_path)
    assert saved_step(run) == recorded_steps(run)[-1] >= 1
    assert "has no checkpoint" not in (tmp_path / "learner.log").read_text()


def has_device(run: Path, pid: int) -> bool:
    tenure = read_tenure(run)
    return bool(tenure and tenure.held and tenure.pid == pid)
