"""A run whose directory is deleted, moved or made unwritable while it is at work: it ends, and says what happened."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.launch import train as launcher
from asyncrl.launch.processes import ServiceProcess
from asyncrl.run_folder.failure import describe_lost, failure_of


def gone(run: Path) -> None:
    shutil.rmtree(run)


def moved(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def emptied(run: Path) -> None:
    gone(run)
    run.mkdir()


def replaced(run: Path) -> None:
    gone(run)
    run.write_text("a file")


@pytest.mark.parametrize("lose", [gone, moved, emptied, replaced])
def test_the_launcher_ends_a_run_whose_directory_is_lost_and_names_it(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], None]
) -> None:
    """Services that go on by themselves: nothing of the message is theirs."""
    config, made = make_config(trainer={"max_steps": 3}), []

    def service(name: str) -> ServiceProcess:
        made.append(ServiceProcess(name, ["sleep", "60"], config.run_path / "logs" / f"{name}.log", {}))
        return made[-1]

    monkeypatch.setattr(launcher, "check_inputs", lambda *_: None)
    monkeypatch.setattr(launcher, "LOST_S", 0.2)
    monkeypatch.setattr(launcher, "learner_service", lambda *_, **__: service("learner"))
    monkeypatch.setattr(launcher, "server_services", lambda *_, **__: [service("rollout_server")])

    def lose_soon() -> None:
        deadline = time.monotonic() + 30
        while not (len(made) == 2 and all(each.process for each in made)) and time.monotonic() < deadline:
            time.sleep(0.01)
        lose(config.run_path)

    thread = threading.Thread(target=lose_soon)
    thread.start()
    with pytest.raises(BadStateError, match=f"the run directory {config.run_path} is gone: it was deleted or moved"):
        launcher.train(config, resume=False)
    thread.join()
    assert [each.code for each in made] == [-15, -15], "the services are ended"


def test_a_directory_that_cannot_be_written_any_more_is_named(tmp_path: Path) -> None:
    """In a process without the rights of root."""
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == tmp_path or folder.name.startswith(("pytest-", "popen-")):  # of this test run, and of its worker
            folder.chmod(0o755)
    script = "import sys; from pathlib import Path; from asyncrl.run_folder.failure import describe_lost as d; "
    script += "import os; os.getuid() == 0 and os.setuid(65534); print(d(Path(sys.argv[1])))"
    run.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", script, run], capture_output=True, text=True, check=True)
    assert f"the run directory {run} cannot be written any more" in done.stdout
    assert "--resume" in done.stdout


@pytest.mark.parametrize("kind", ["status", "journal", "cause", "other file", "no file"])
def test_a_learner_whose_directory_is_gone_ends_in_bad_state_and_other_crashes_stay_crashes(
    tmp_path: Path, kind: str
) -> None:
    run, named = tmp_path / "run", kind not in ("other file", "no file")
    error: BaseException = {
        "status": FileNotFoundError(errno.ENOENT, "No such file", str(run / ".status.json.tmp")),
        "journal": sqlite3.OperationalError("attempt to write a readonly database"),
        "cause": RuntimeError("a library"),
        "other file": FileNotFoundError(errno.ENOENT, "No such file", "/etc/nothing"),
        "no file": RuntimeError("unforeseen"),
    }[kind]
    if kind == "cause":
        error.__cause__ = PermissionError(errno.EACCES, "Permission denied", str(run / "checkpoints"))
    failure = failure_of(error, "learner", run)
    assert (failure is not None) == named
    if failure is not None:
        assert failure.kind == "bad_state"
        assert failure.reason.startswith(f"the run directory {run} is gone")
    run.mkdir()
    assert (describe_lost(run), failure_of(error, "learner", run)) == ("", None)
