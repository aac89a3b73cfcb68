"""Sync mode with the real processes: one device in turns, and nothing else is different."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.run_folder.contents import checkpoint_folder
from protocol.device_lock import read_tenure
from tests.rigs.prefork import RUN_FIRST, Service
from tests.rigs.small_runs import assert_every_prompt_trained_once, failure_of, logs, small
from tests.rigs.tiny import make_tiny_model
from tests.rigs.two_processes import run_both, start, start_command, with_ports, write_config
from tests.rigs.waiting import wait_until
from tests.system.test_resume import assert_same_run, resume_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("level", [1, 2])
def test_a_sync_run_is_the_on_policy_run_on_two_devices_bit_for_bit(
    make_config: Callable[..., RunConfig], tmp_path: Path, on_policy: Path, level: int
) -> None:
    run = tmp_path / "sync"
    asynchronous = resume_config(make_config, run)
    trainer = asynchronous.trainer.model_copy(update={"mode": "sync"})
    rollout = asynchronous.rollout.model_copy(update={"sleep_level": level})
    config = asynchronous.model_copy(update={"trainer": trainer, "rollout": rollout})
    assert run_both(config, run) == (0, 0), logs(run)
    assert_same_run(run, on_policy, config)


# --- what goes wrong ----------------------------------------------------------------------------------


class Pair:
    """Learner and rollout server of a sync run, and their lease."""

    def __init__(self, config: RunConfig, folder: Path, *, server_of_this: bool = False):
        self.run = folder
        self.file = write_config(with_ports(config), folder)
        self.learner = start("learner", self.file)
        self.server = start("rollout_server", self.file, of_this=server_of_this)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.learner, self.server):
            process.kill()
            process.wait()

    def wait_for(self, satisfied: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
        wait_until(satisfied, "the other side's turn", self.run, timeout_s=timeout_s, poll_s=0.005)

    def has_it(self, process: Service, *, from_fence: int = 1) -> bool:
        tenure = read_tenure(self.run)
        return bool(tenure and tenure.held and tenure.pid == process.pid and tenure.fence >= from_fence)

    def stop_in_its_turn(self, process: Service, *, from_fence: int) -> None:
        """It has the device, and does nothing until SIGCONT."""

        def stopped() -> bool:
            if not self.has_it(process, from_fence=from_fence):
                return False
            process.send_signal(signal.SIGSTOP)
            self.wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            if self.has_it(process, from_fence=from_fence):
                return True
            process.send_signal(signal.SIGCONT)
            return False

        self.wait_for(stopped)

    def codes(self) -> list[int]:
        return [process.wait(timeout=90) for process in (self.learner, self.server)]


def slow_server(make_config: Callable[..., RunConfig], run: Path, **network: float) -> RunConfig:
    """A sync run in which the server's turns last about half a second."""
    config = small(
        make_config,
        rollout={"engine": "scripted", "engine_args": {"mean_length": 6, "seconds_per_token": 0.1}},
        trainer={"mode": "sync"},
        network=network,
    )
    return config.model_copy(update={"run_dir": str(run)})


def test_a_server_whose_learner_is_silent_returns_the_device_unasked(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The learner, asleep, stands still; it finds its device free and goes on as if nothing had happened."""
    run = tmp_path / "run"
    with Pair(slow_server(make_config, run, timeout_s=1.0), run) as pair:
        pair.wait_for(lambda: pair.has_it(pair.server, from_fence=2))
        pair.learner.send_signal(signal.SIGSTOP)
        pair.wait_for(lambda: not pair.has_it(pair.server))
        pair.learner.send_signal(signal.SIGCONT)
        assert pair.codes() == [0, 0], logs(run)
    assert "the learner is silent: returning the device" in (run / "rollout_server.log").read_text()
    assert_every_prompt_trained_once(run)


def test_ctrl_c_while_the_learner_sleeps_and_then_resume(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = tmp_path / "run"
    file, log = tmp_path / "config.yaml", tmp_path / "sync.log"
    config = slow_server(make_config, run)
    two_devices = config.model_copy(update={"trainer": config.trainer.model_copy(update={"mode": "async"})})
    file.write_text(dump_config(two_devices))

    def server_has_it() -> bool:
        tenure = read_tenure(run)
        return bool(tenure and tenure.held and tenure.fence >= 4 and tenure.holder == "rollout_server")

    command = start_command("sync", str(file), log=log)
    try:
        wait_until(server_has_it, "the server's second turn", run / "logs")
        family = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=40) == 130, log.read_text()
        assert "interrupted; the same command with --resume continues" in log.read_text()
        assert psutil.wait_procs(family, timeout=5)[1] == []
        assert [path.name for path in run.iterdir() if path.name.startswith("tmp")] == [], "no file of sleeping tensors"
        status = json.loads((run / "status.json").read_text())
        assert (status["phase"], status["device"]["holder"]) == ("interrupted", "learner"), "it takes it to save"
        assert checkpoint_folder(run, status["step"]).is_dir()
        command = start_command("sync", str(file), "--resume", log=log)
        assert command.wait(timeout=120) == 0, log.read_text()
    finally:
        command.kill()
    assert_every_prompt_trained_once(run)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["lease_fence"] >= 5


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 MB: much more than what an allocator may have kept."""
    return make_tiny_model(tmp_path_factory.mktemp("large") / "model", intermediate=50_000)


@pytest.mark.parametrize("victim", ["learner", "rollout_server"])
def test_a_side_that_finds_no_room_to_wake_up_ends_the_run_with_the_numbers(
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    large_model: Path,
    victim: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, keep_nothing = tmp_path / "run", tmp_path / "keep_nothing.py"
    # Memory that was freed is gone, whatever the C library would keep (M_MMAP_THRESHOLD in malloc.h is -3).
    keep_nothing.write_text("import ctypes\nassert ctypes.CDLL(None).mallopt(-3, 65536) == 1\n")
    monkeypatch.setenv(RUN_FIRST, str(keep_nothing))
    config = small(make_config, model={"path": str(large_model)}, trainer={"mode": "sync"})
    with Pair(config.model_copy(update={"run_dir": str(run)}), run) as pair:
        sleeper, holder = pair.learner, pair.server
        if victim == "rollout_server":
            sleeper, holder = holder, sleeper
        pair.stop_in_its_turn(holder, from_fence=4 if holder is pair.server else 3)
        # What it has while it sleeps, and a little more.
        limit = psutil.Process(sleeper.pid).memory_info().vms + (16 << 20)
        resource.prlimit(sleeper.pid, resource.RLIMIT_AS, (limit, limit))
        holder.send_signal(signal.SIGCONT)
        assert sleeper.wait(timeout=90) == 3, logs(run)
        reason = (run / f"{victim}.log").read_text().splitlines()[-1]
        assert re.match(r"error: .*cannot wake: it needs \d{2,3} MiB on cpu and got \d+; \d+ MiB are free", reason)
        if victim == "learner":
            assert failure_of(run).reason == reason.removeprefix("error: ")
            assert holder.wait(timeout=60) == 4, "it is told"
