"""Runs with clocks that jump, processes that stand still, two learners, another run, a peer that never comes back."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.run_folder.failure import FAILURE_FILE, RESERVED_FILE
from asyncrl.run_folder.lock import LEARNER_LOCK
from tests.rigs.prefork import RUN_FIRST, Service
from tests.rigs.small_disks import needs_mount, small_disks
from tests.rigs.small_runs import assert_every_prompt_trained_once, failure_of, logs, small
from tests.rigs.two_processes import start, start_command, with_ports, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

IMPATIENT = {"timeout_s": 0.5, "heartbeat_s": 0.1, "reconnect_timeout_s": 2.0}
JUMPING_CLOCK = '''
import random, time
_real, _rng = time.time, random.Random(5)
def _jumping():
    """The wall clock, up to a day off in either direction, another one at every call."""
    return _real() + _rng.uniform(-86_400, 86_400)
time.time = _jumping
time.time_ns = lambda: int(_jumping() * 1e9)
'''


@contextmanager
def running(*services: Service) -> Iterator[None]:
    try:
        yield
    finally:
        for service in services:
            service.send_signal(signal.SIGCONT)
            service.kill()
            service.wait()


def scripted(make_config: Callable[..., RunConfig], **sections: dict[str, Any]) -> RunConfig:
    """A run whose groups take a quarter of a second, so that there is time for things to go wrong."""
    slow = {"mean_length": 8, "length_sigma": 0.5, "seconds_per_token": 0.03}
    rollout = {"engine": "scripted", "engine_args": slow, **sections.pop("rollout", {})}
    return small(make_config, rollout=rollout, **sections)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def test_a_wall_clock_that_jumps_by_days_changes_nothing(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = tmp_path / "run", tmp_path / "clock" / "sitecustomize.py"
    clock.parent.mkdir()
    clock.write_text(JUMPING_CLOCK)
    monkeypatch.setenv(RUN_FIRST, str(clock))
    monkeypatch.setenv("PYTHONPATH", f"{clock.parent}:{ROOT}")  # of the processes that services start
    config = with_ports(scripted(make_config, learner={"max_staleness": 1}, trainer={"max_steps": 5}))
    file = write_config(config, run)
    services = [start("learner", file), start("rollout_server", file)]
    with running(*services):
        assert [service.wait(timeout=120) for service in services] == [0, 0], logs(run)
    assert_every_prompt_trained_once(run, 5)
    times = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert max(times) - min(times) > 3600, "the clock has jumped"
    said = logs(run)
    assert not any(word in said for word in ("is gone: silent", "has been silent", "suspended or blocked", "WARNING"))


def test_a_server_that_stands_still_is_replaced_and_taken_back(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Its tickets go to the other server; what it sends when it wakes up is late, and known to be."""
    run = tmp_path / "run"
    network = {"timeout_s": 1.0, "heartbeat_s": 0.1}
    config = with_ports(scripted(make_config, learner={"max_staleness": 2}, trainer={"max_steps": 16}, network=network))
    file = write_config(config, run)
    second = config.telemetry.model_copy(update={"rollout_port": 0})
    other = write_config(config.model_copy(update={"telemetry": second}), tmp_path / "second")
    learner, sleeper, awake = start("learner", file), start("rollout_server", file), start("rollout_server", other)
    learner_log = run / "learner.log"
    with running(learner, sleeper, awake):
        wait_until(lambda: learner_log.read_text().count("is welcome") == 2, "two servers", run)
        wait_until(lambda: steps_of(run) >= 2, "two steps", run)
        sleeper.send_signal(signal.SIGSTOP)
        wait_until(lambda: "is gone: silent for" in learner_log.read_text(), "the loss of the server", run)
        sleeper.send_signal(signal.SIGCONT)
        wait_until(lambda: learner_log.read_text().count("is welcome") == 3, "its return", run)
        assert [service.wait(timeout=120) for service in (learner, sleeper, awake)] == [0, 0, 0], logs(run)
    assert_every_prompt_trained_once(run, 16)
    assert "the learner does not know this connection" in (run / "rollout_server.log").read_text()


def test_a_server_that_is_asked_to_end_leaves_what_it_has_begun_to_the_other(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = with_ports(scripted(make_config, learner={"max_staleness": 2}, trainer={"max_steps": 12}))
    file = write_config(config, run)
    second = config.telemetry.model_copy(update={"rollout_port": 0})
    other = write_config(config.model_copy(update={"telemetry": second}), tmp_path / "second")
    learner, staying = start("learner", file), start("rollout_server", other)
    leaving = start("rollout_server", file, "rollout.engine_args.seconds_per_token=1.0")  # is in the middle for seconds
    said, theirs = run / "learner.log", run / "rollout_server.log"
    with running(learner, leaving, staying):
        wait_until(lambda: "a first token, at 1 s a token" in logs(run), "its first token", run)
        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(timeout=20) == 130, logs(run)
        assert [service.wait(timeout=120) for service in (learner, staying)] == [0, 0], logs(run)
    assert_every_prompt_trained_once(run, 12)
    announced = re.search(r"ending: (\d+) tickets go back", theirs.read_text())
    assert announced, logs(run)
    returned = [int(n) for n in re.findall(r"comes back from \S+ with (\d+) tokens", said.read_text())]
    assert len(returned) == int(announced[1])
    assert sum(returned) > 0
    assert "WARNING" not in theirs.read_text()


def test_a_second_learner_is_refused_and_harms_nothing(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = write_config(with_ports(scripted(make_config)), run)
    first = start("learner", file)
    with running(first):
        wait_until(lambda: (run / JOURNAL_FILE).exists(), "the journal", run)
        taken, unusable = "another learner (process", "network.control_port is 0"
        for arguments, says in ((["--resume"], taken), ([], taken), (["network.control_port=0"], unusable)):
            second = start("learner", file, *arguments)
            with running(second):
                assert second.wait(timeout=60) == 2, logs(run)
            assert says in (run / "learner.log").read_text().splitlines()[-1]
            assert not (run / FAILURE_FILE).exists(), "the first has not failed"
            assert (run / RESERVED_FILE).exists(), "and keeps its room for a reason"
        server = start("rollout_server", file)
        with running(server):
            assert [service.wait(timeout=120) for service in (first, server)] == [0, 0], logs(run)
    assert_every_prompt_trained_once(run)


def test_a_server_of_another_reward_is_refused_and_one_whose_learner_makes_another_run_stops(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run, other_run, reward = tmp_path / "run", tmp_path / "other", tmp_path / "rw.py"
    source = "def score(sample): return len(sample.completion) % 2"
    reward.write_text(source)
    rewards = {"functions": [{"function": f"{reward}:score"}]}
    config = with_ports(scripted(make_config, trainer={"max_steps": 1000}, network=IMPATIENT, reward=rewards))
    file = write_config(config, run)
    learner, server = start("learner", file), start("rollout_server", file, "network.reconnect_timeout_s=60")
    with running(learner, server):
        wait_until(lambda: steps_of(run) >= 1, "a step", run)
        reward.write_text("def score(sample): return 1.0")
        at = [f"network.{key}={getattr(config.network, key)}" for key in ("control_port", "weights_port")]
        later = start("rollout_server", write_config(with_ports(config), tmp_path / "later"), *at)
        with running(later):
            assert later.wait(timeout=90) == 2, logs(run) + logs(tmp_path / "later")
        reason = (tmp_path / "later" / "rollout_server.log").read_text().splitlines()[-1]
        assert "component score: rw.py, or a file that it imports, is not what the run has. Put back" in reason
        reward.write_text(source)
        learner.kill()
        other = start("learner", write_config(config.model_copy(update={"run_dir": str(other_run)}), other_run))
        with running(other):
            assert server.wait(timeout=90) == 3, logs(run) + logs(other_run)
    reason = (run / "rollout_server.log").read_text().splitlines()[-1]
    assert re.match("error: .* now makes run .* Start it again for the new run", reason)
    assert not any((folder / FAILURE_FILE).exists() for folder in (run, other_run)), "no learner has said how it ended"


def test_a_launched_run_says_why_its_server_ended_it(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = scripted(make_config, trainer={"max_steps": 100_000}, network=IMPATIENT)
    run, file = config.run_path, tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    log = tmp_path / "train.log"
    launched = start_command("train", str(file), log=log)
    try:
        wait_until(lambda: steps_of(run) >= 1, "a step", run / "logs")
        os.kill(int((run / LEARNER_LOCK).read_text()), signal.SIGSTOP)
        code = launched.wait(timeout=90)
    finally:
        launched.terminate()
    printed = log.read_text()
    assert code == 3, printed
    failure = failure_of(run)
    assert (failure.service, failure.kind) == ("rollout_server", "timed_out")
    assert f"error: {failure.reason}\nrollout_server stopped the run; saved in {run / FAILURE_FILE}" in printed
    assert re.search(r" has been gone for . s \(network\.reconnect_timeout_s = 2\)", failure.reason)
    assert not list((run / "logs").glob("*.json"))


def test_a_server_whose_learner_does_not_come_says_so_and_begins_no_run(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = with_ports(scripted(make_config, network={"start_timeout_s": 1.0}))
    file = write_config(config, tmp_path / "config")
    for is_there in (False, True):
        server = start("rollout_server", file, f"run_dir={run}")
        with running(server):
            assert server.wait(timeout=60) == 3, logs(tmp_path / "config")
        said = (tmp_path / "config" / "rollout_server.log").read_text()
        assert "Traceback" not in said
        assert f"error: no learner answered at {config.network.control_endpoint} within 1 s" in said.splitlines()[-1]
        assert list(run.glob("*")) == [], "what is not empty a learner does not begin in"
        assert run.exists() == is_there
        run.mkdir(exist_ok=True)


def test_a_wait_beyond_its_deadline_names_the_step_the_ticket_and_its_server(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    learner_section = {"max_staleness": 0, "wait_timeout_s": 1.5}
    config = scripted(make_config, learner=learner_section, trainer={"max_steps": 1000}, network={"timeout_s": 60.0})
    file = write_config(with_ports(config), run)
    learner, server = start("learner", file), start("rollout_server", file)
    with running(learner, server):
        wait_until(lambda: steps_of(run) >= 1, "a step", run)
        server.send_signal(signal.SIGSTOP)
        assert learner.wait(timeout=60) == 3, logs(run)
    reason = failure_of(run).reason
    name = re.search(r"(\S+) is welcome", (run / "learner.log").read_text())
    assert name is not None
    assert re.match(rf"waited 1\.5 s for groups of step .*oldest: ticket .*held by {re.escape(name[1])}", reason), (
        reason
    )


@needs_mount
def test_a_learner_that_comes_back_with_other_shared_memory_is_followed_over_zmq(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """As in a container that was started again: its /dev/shm is a new one."""
    run = tmp_path / "run"
    config = with_ports(scripted(make_config, trainer={"max_steps": 60}))
    file = write_config(config, run)
    learner, server = start("learner", file), start("rollout_server", file)
    with running(learner, server):
        wait_until(lambda: steps_of(run) >= 2, "two steps", run)
        learner.kill()
        learner.wait()
        before = steps_of(run)
        again = start("learner", file, "--resume", "trainer.max_steps=60", first=small_disks(run, {"/dev/shm": "50%"}))
        with running(again):
            wait_until(lambda: steps_of(run) > before, "a step of the learner that came back", run, timeout_s=90)
            assert server.poll() is None
    said = (run / "rollout_server.log").read_text()
    assert "weights over shm" in said
    assert "weights come over zmq now" in said
