"""The process that holds a run directory saves why the run stopped; no other process does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, ExitCode, RunTakenError, UserError, WaitTimeoutError
from asyncrl.launch import train as launcher
from asyncrl.launch.processes import ServiceProcess
from asyncrl.launch.supervisor import Outcome
from asyncrl.launch.train import check_run_dir, train
from asyncrl.run_folder import lock as run_lock
from asyncrl.run_folder.failure import FAILURE_FILE, Failure, Kind, read_failure
from asyncrl.run_folder.lock import (
    LAUNCHER_LOCK,
    LEARNER_LOCK,
    LearnerLock,
    holder,
    holding,
    is_over,
    lock_run,
)
from asyncrl.telemetry.recorder import RunRecorder
from tests.rigs.small_runs import failure_of, save_failure

FULL = OSError(errno.ENOSPC, "No space left on device")
ENDINGS: dict[str, tuple[BaseException | None, Kind | None]] = {
    "well": (None, None),
    "bad state": (BadStateError("the gradient is inf"), "bad_state"),
    "a wait": (WaitTimeoutError("nobody came"), "timed_out"),
    "a full disk": (FULL, "disk_full"),
    "a mistake": (UserError("fix it"), "user_error"),
    "a crash": (RuntimeError("unforeseen"), None),
    "an interruption": (KeyboardInterrupt(), None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_goes_on_says_how_this_attempt_ended_and_one_that_does_not_begin_only_bad_state(
    tmp_path: Path, ending: str
) -> None:
    error, kind = ENDINGS[ending]
    run = tmp_path / "runs" / "first"

    def attempt(*, accepted: bool) -> Failure | None:
        """Returns the failure that is recorded afterwards."""
        with suppress(Exception, KeyboardInterrupt), LearnerLock(run) as held:
            if accepted:
                held.accept()
            if error:
                raise error
        return read_failure(run)

    left = attempt(accepted=False)
    assert (left is not None) == run.exists() == (ending == "bad state"), "nothing else is left"
    run.mkdir(parents=True, exist_ok=True)
    earlier = save_failure(run, "disk_full")
    found = attempt(accepted=False)
    assert found == earlier if ending != "bad state" else found and found.kind == kind
    found = attempt(accepted=True)
    assert (found.kind if found else None) == kind
    assert set(os.listdir(run)) <= {FAILURE_FILE}


def test_a_reason_does_not_wait_until_all_is_closed_and_the_first_counts(tmp_path: Path) -> None:
    with suppress(OSError), LearnerLock(tmp_path) as held:
        held.accept()
        held.save(BadStateError("the loss is nan"))
        assert read_failure(tmp_path) is not None
        raise FULL  # as of a file that is closed
    assert failure_of(tmp_path).reason == "the loss is nan"


def test_a_learner_that_a_machine_started_looks_once_more_when_it_has_the_lock(tmp_path: Path) -> None:
    """The last holder may have met bad state since `--unattended` decided to go on."""
    save_failure(tmp_path)
    before = (tmp_path / FAILURE_FILE).read_bytes()
    with pytest.raises(BadStateError, match=r"stopped in bad state: the loss is nan.*--resume"):
        LearnerLock(tmp_path, unattended=True).__enter__()
    assert (os.listdir(tmp_path), (tmp_path / FAILURE_FILE).read_bytes()) == ([FAILURE_FILE], before)
    with LearnerLock(tmp_path):
        pass
    save_failure(tmp_path, "disk_full")
    with LearnerLock(tmp_path, unattended=True):
        pass


# --- the lock ---------------------------------------------------------------------------------------


def test_a_look_does_not_keep_a_learner_out(tmp_path: Path) -> None:
    os.close(lock_run(tmp_path))
    looking = os.open(tmp_path / LEARNER_LOCK, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, (looking,)).start()
    descriptor = lock_run(tmp_path)
    assert holder(tmp_path, LEARNER_LOCK) == str(os.getpid())
    os.close(descriptor)


def test_a_lock_whose_file_is_taken_away_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last owner removes it. Two processes that waited would hold a file each."""
    lock, opened = run_lock.fcntl.flock, []

    def taken_away(descriptor: int, how: int) -> None:
        if not opened:
            (tmp_path / LEARNER_LOCK).unlink()
        opened.append(descriptor)
        lock(descriptor, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", taken_away)
    descriptor = lock_run(tmp_path)
    try:
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(descriptor), os.stat(tmp_path / LEARNER_LOCK))
        assert holder(tmp_path, LEARNER_LOCK) == str(os.getpid())
    finally:
        os.close(descriptor)


def test_a_full_disk_at_the_launcher_is_said_and_not_a_traceback(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(config.run_path / "logs" / "learner.log"))

    monkeypatch.setattr(ServiceProcess, "start", full)
    with pytest.raises(BadStateError, match=r"the disk of .* is full.*Make room"):
        train(config, resume=False)
    check_run_dir(config.run_path, resume=False)


def test_a_learner_alone_keeps_out_of_a_launcher_s_run_and_its_own_learner_does_not(tmp_path: Path) -> None:
    """Between a crash of that one and its restart nobody holds the learner's lock."""
    with holding(tmp_path, LAUNCHER_LOCK):
        with pytest.raises(RunTakenError, match=rf"another launcher \(process {os.getpid()}\)"), LearnerLock(tmp_path):
            pass
        assert os.listdir(tmp_path) == [LAUNCHER_LOCK]
        script = f"""if True:
            from pathlib import Path
            from asyncrl.run_folder.lock import LearnerLock
            with LearnerLock(Path("{tmp_path}")):
                print("held")
        """
        assert subprocess.check_output([sys.executable, "-c", script], timeout=60) == b"held\n"


# --- is it over? ------------------------------------------------------------------------------------


def test_a_run_is_over_that_is_finished_and_that_no_learner_has(tmp_path: Path) -> None:
    assert not is_over(tmp_path / "nowhere")
    for phase, over in (("training", False), ("finished", True)):
        RunRecorder(tmp_path).status(phase=phase)
        assert is_over(tmp_path) == over
    with LearnerLock(tmp_path):
        assert not is_over(tmp_path)
    assert is_over(tmp_path)


# --- a server that ends the run ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "of_the_learner", "ago_s", "saved"),
    [
        ("training", False, 0.0, "of the server"),
        ("training", True, 0.0, "of the learner"),
        ("training", False, 60.0, None),
        ("", False, 0.0, None),
        ("finished", False, 0.0, None),
    ],
    ids=["under way", "the learner has a reason", "of an earlier launch", "not begun", "finished"],
)
def test_what_stops_a_launched_server_is_what_stopped_a_run_that_is_under_way(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    of_the_learner: bool,
    ago_s: float,
    saved: str | None,
) -> None:
    config = make_config()

    class Supervisor:
        def __init__(self, learner: Any, server: Any, **_: Any):
            self.server, self.restarts = server, {}

        def run(self, _tick: object) -> Outcome:
            if phase:
                RunRecorder(config.run_path).status(phase=phase, step=2)
            if of_the_learner:
                save_failure(config.run_path, reason="of the learner", time=time.time())
            told = Failure("rollout_server", "bad_state", "of the server", time.time() - ago_s)
            self.server.failure.parent.mkdir()
            self.server.failure.write_text(json.dumps(vars(told)))
            return Outcome(ExitCode.BAD_STATE, failed=self.server)

    monkeypatch.setattr(launcher, "Supervisor", Supervisor)
    assert train(config, resume=False) == ExitCode.BAD_STATE
    found = read_failure(config.run_path)
    assert (found.reason if found else None) == saved
