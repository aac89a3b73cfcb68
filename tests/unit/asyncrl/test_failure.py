"""Bad state ends a service with code 3 and a reason in the run directory, whatever else is broken."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import ExitCode, LearnerLeftError, UserError
from asyncrl.launch.processes import Service
from asyncrl.launch.supervisor import Outcome
from asyncrl.launch.train import report
from asyncrl.run_folder.failure import (
    FAILURE_FILE,
    ROOM_FILE,
    Failure,
    FailureRoom,
    Kind,
    failure_of,
    read_failure,
)
from asyncrl.run_folder.full_disk import describe_full_disk, is_disk_full
from asyncrl.tools.panel.run_snapshot import RunSnapshot
from tests.rigs.small_runs import save_failure

CONFIG = """\
run_dir: {run_dir}
model: {{path: nowhere}}
data: {{train_files: [rows.parquet]}}
reward: {{functions: [{{function: exact_match}}]}}
"""
SERVICE = """
import errno, os, sqlite3, sys
from asyncrl.entry import run_service
from asyncrl.errors import BadStateError, RunTakenError, UserError, WaitTimeoutError
def main(config, resume):
    {body}
run_service({name!r}, main, leave={leave})
"""


def run_service(
    tmp_path: Path, body: str, name: str = "rollout_server", *arguments: str, leave: bool = False
) -> subprocess.CompletedProcess[str]:
    """A service whose `main` is `body`, with `tmp_path/run` as its run directory."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(run_dir=tmp_path / "run"))
    command = [
        sys.executable,
        "-c",
        SERVICE.format(body=body, name=name, leave=leave),
        "--config",
        str(file),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_bad_state_is_saved_where_the_launcher_looks_with_the_last_known_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"step": 7}')
    done = run_service(
        tmp_path, "raise BadStateError('the loss is nan')", "learner", "--failure-file", f"{tmp_path}/why.json"
    )
    assert done.returncode == ExitCode.BAD_STATE
    assert done.stderr.splitlines()[-1] == "error: the loss is nan"
    saved = read_failure(tmp_path, "why.json")
    assert saved is not None
    assert (saved.service, saved.kind, saved.reason, saved.step) == ("learner", "bad_state", "the loss is nan", 7)
    assert abs(saved.time - time.time()) < 30
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "run", "why.json"]
    assert os.listdir(tmp_path / "run") == ["status.json"]


@pytest.mark.parametrize(
    "body",
    [
        "raise OSError(errno.ENOSPC, 'No space left on device', config.run_dir + '/metrics.jsonl')",
        "raise OSError(errno.EDQUOT, 'Disk quota exceeded')",
        "raise OSError(errno.EFBIG, 'File too large')",
        "print(1, file=open('/dev/full', 'w'), flush=True)",
        "sqlite3.connect(':memory:').executescript('PRAGMA max_page_count=2; CREATE TABLE t AS SELECT zeroblob(9999)')",
        "raise RuntimeError('Error: I/O error: No space left on device (os error 28)')",
        "raise BadStateError('checkpoint') from OSError(errno.ENOSPC, 'No space left on device')",
    ],
)
def test_a_full_disk_is_bad_state_that_names_the_directory_and_its_free_space(tmp_path: Path, body: str) -> None:
    done = run_service(tmp_path, body, "rollout_server", "--failure-file", f"{tmp_path}/why.json")
    assert done.returncode == ExitCode.BAD_STATE, done.stderr
    saved = read_failure(tmp_path, "why.json")
    assert saved is not None
    assert (saved.service, saved.kind, saved.step) == ("rollout_server", "disk_full", None)
    assert re.search(rf"the disk of {tmp_path}/?(run)? is full", saved.reason)
    assert "MiB free" in saved.reason
    assert done.stderr.splitlines()[-1] == f"error: {saved.reason}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", ExitCode.FINISHED),
        ("raise RuntimeError('unforeseen')", ExitCode.CRASHED),
        ("raise OSError(errno.ECONNRESET, 'gone')", ExitCode.CRASHED),
        ("raise KeyboardInterrupt", ExitCode.INTERRUPTED),
    ],
)
def test_other_endings_have_their_code_and_leave_nothing_where_the_launcher_looks(
    tmp_path: Path, body: str, code: ExitCode
) -> None:
    done = run_service(tmp_path, body, "rollout_server", "--failure-file", f"{tmp_path}/why.json")
    assert done.returncode == code, done.stderr
    assert os.listdir(tmp_path) == ["config.yaml"]
    assert ("Traceback" in done.stderr) == (code is ExitCode.CRASHED)


@pytest.mark.parametrize(
    "error", ["BadStateError", "WaitTimeoutError", "UserError", "RuntimeError", "KeyboardInterrupt"]
)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_service_writes_nothing_into_a_run_that_it_does_not_hold(tmp_path: Path, error: str, is_there: bool) -> None:
    """A server by itself, and a learner that was refused: the run is another's, and may be at work."""
    run = tmp_path / "run"
    if is_there:
        run.mkdir()
        for name in (FAILURE_FILE, ROOM_FILE):
            (run / name).write_text("of the other")
    assert run_service(tmp_path, f"raise {error}('why')").returncode != 0
    assert run.exists() == is_there
    assert {file.name: file.read_text() for file in run.glob("*")} == (
        dict.fromkeys((FAILURE_FILE, ROOM_FILE), "of the other") if is_there else {}
    )


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("pass", ExitCode.FINISHED, ""),
        ("raise BadStateError('the loss is nan')", ExitCode.BAD_STATE, "error: the loss is nan"),
        ("raise RuntimeError('unforeseen')", ExitCode.CRASHED, "RuntimeError: unforeseen"),
    ],
)
def test_nothing_comes_after_the_last_word_of_a_learner(tmp_path: Path, ending: str, code: ExitCode, last: str) -> None:
    """What an extension module does while the interpreter is taken apart is not its: here it aborts."""
    body = (
        "import atexit, ctypes, threading, time; ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort); "
        "atexit.register(print, 'handler'); "
        f"threading.Thread(target=lambda: (time.sleep(0.3), print('thread', end=' '))).start(); {ending}"
    )
    assert run_service(tmp_path, body).returncode == -signal.SIGABRT, "the module's ending is reached elsewhere"
    done = run_service(tmp_path, body, leave=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == "thread handler\n", "what the process has to do is done, and flushed"
    assert (done.stderr.splitlines() or [""])[-1] == last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_learner_ends_cuts_no_exit_handler_off(tmp_path: Path, number: signal.Signals) -> None:
    told = f"os.kill(os.getpid(), {number.value})"
    done = run_service(tmp_path, f"import atexit; atexit.register(lambda: ({told}, print('handler')))", leave=True)
    assert (done.returncode, done.stdout) == (ExitCode.FINISHED, "handler\n"), done.stderr


@pytest.mark.parametrize(("error", "code"), [("BadStateError", ExitCode.BAD_STATE), ("UserError", ExitCode.USER_ERROR)])
def test_a_log_on_a_full_disk_changes_no_exit_code(tmp_path: Path, error: str, code: ExitCode) -> None:
    """Else the launcher would start again what would fail again."""
    script = SERVICE.format(body=f"raise {error}('why')", name="learner", leave=True)
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(run_dir=tmp_path / "run"))
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script, "--config", str(file)], stderr=full, timeout=30)
    assert done.returncode == code


def test_an_exit_handler_that_hangs_does_not_keep_a_service(tmp_path: Path) -> None:
    body = "import atexit, time; print('said'); atexit.register(time.sleep, 60); raise BadStateError('the loss is nan')"
    began = time.monotonic()
    done = run_service(tmp_path, body, leave=True)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_STATE, "said\n"), done.stderr
    assert time.monotonic() - began < 20


def a_failure(kind: Kind = "bad_state", reason: str = "the loss is nan") -> Failure:
    return Failure("learner", kind, reason, 0.0)


def test_the_reason_is_saved_on_a_disk_that_is_full(tmp_path: Path) -> None:
    """No new block is needed: the room that was taken is filled in place and renamed."""
    with FailureRoom(tmp_path / FAILURE_FILE) as room:
        (taken,) = tmp_path.iterdir()
        before = (taken.stat().st_ino, taken.stat().st_blocks)
        assert room.save(a_failure("disk_full", "\N{EURO SIGN}" * 5000))
        after = (tmp_path / FAILURE_FILE).stat()
        assert (after.st_ino, after.st_blocks) == before
    saved = read_failure(tmp_path)
    assert saved is not None
    assert saved.reason == "\N{EURO SIGN}" * 1500
    assert os.listdir(tmp_path) == [FAILURE_FILE]


def test_the_room_of_a_process_that_was_killed_is_taken_over_and_given_back(tmp_path: Path) -> None:
    (tmp_path / ROOM_FILE).write_text("of before")
    with FailureRoom(tmp_path / FAILURE_FILE):
        assert (tmp_path / ROOM_FILE).stat().st_size == 8192
    assert os.listdir(tmp_path) == []


def test_a_reason_that_cannot_be_saved_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FailureRoom(tmp_path / FAILURE_FILE) as room:
        (tmp_path / ROOM_FILE).unlink()
        assert not room.save(a_failure())
    assert f"the reason could not be saved in {tmp_path / FAILURE_FILE}" in caplog.text
    assert read_failure(tmp_path) is None
    with pytest.raises(FileNotFoundError), FailureRoom(tmp_path / "nowhere" / FAILURE_FILE):
        pass


def test_a_mistake_of_the_user_is_one_though_a_full_disk_led_to_it(tmp_path: Path) -> None:
    mistake = UserError("make room")
    mistake.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    found = failure_of(mistake, "learner", tmp_path)
    assert found is not None
    assert (found.kind, found.reason) == ("user_error", "make room")
    assert failure_of(RuntimeError("unforeseen"), "learner", tmp_path) is None
    assert failure_of(LearnerLeftError("No space left on device, it said"), "rollout_server", tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"reason": "x"}', pytest.param("[" * 100_000, id="deep")])
def test_a_damaged_file_is_no_failure_of_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / FAILURE_FILE).write_text(content)
    assert read_failure(tmp_path) is None


def test_only_a_full_disk_is_taken_for_one() -> None:
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = ValueError("inner")
    wrapped.__cause__.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_full(wrapped)
    loop = RuntimeError("a")
    loop.__context__ = RuntimeError("b")
    loop.__context__.__context__ = loop
    for other in (loop, OSError(errno.EACCES, "Permission denied"), sqlite3.OperationalError("database is locked")):
        assert not is_disk_full(other)


def test_the_full_disk_is_that_of_the_file_that_was_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    problem = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "elsewhere" / "weights"))
    assert f"the disk of {tmp_path / 'elsewhere'} is full" in describe_full_disk(problem, tmp_path)
    problem = OSError(errno.ENOSPC, "No space left on device", "/nowhere/at/all")
    assert f"the disk of {tmp_path} is full" in describe_full_disk(problem, tmp_path)


def config(run_dir: Path) -> RunConfig:
    sections = {"model": {"path": "x"}, "data": {"train_files": ["x"]}}
    reward = {"functions": [{"function": "exact_match"}]}
    return RunConfig.model_validate({"run_dir": str(run_dir), "reward": reward, **sections})


@pytest.mark.parametrize("saved", ["now", "earlier", ""])
def test_the_launcher_prints_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: str) -> None:
    """From failure.json, or from the log where that could not be written, or is of an earlier attempt."""
    since = time.time()
    script = "import sys; print('loading'); print('error: the loss is nan'); sys.exit(3)"
    learner = Service("learner", [sys.executable, "-c", script], tmp_path / "learner.log", {})
    learner.start()
    assert learner.process is not None
    learner.process.wait(timeout=10)
    if saved:
        reason, when = ("the loss is nan", since + 1) if saved == "now" else ("of before", since - 1)
        save_failure(tmp_path, reason=reason, time=when)
    assert report(config(tmp_path), Outcome(3, failed=learner), RunSnapshot(tmp_path, since=since)) == 3
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "error: the loss is nan"
    assert len(told) == (2 if saved == "now" else 1)
    if saved == "now":
        assert str(tmp_path / FAILURE_FILE) in told[1]
        assert json.loads((tmp_path / FAILURE_FILE).read_text())["service"] == "learner"


@pytest.mark.parametrize("log", ["", "loading\nstopped: the di"])
def test_the_launcher_says_so_where_a_log_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str
) -> None:
    """On a disk that is full."""
    learner = Service("learner", [sys.executable, "-c", "import sys; sys.exit(3)"], tmp_path / "learner.log", {})
    learner.start()
    assert learner.process is not None
    learner.process.wait(timeout=10)
    learner.log.write_text(log)
    assert report(config(tmp_path), Outcome(3, failed=learner), RunSnapshot(tmp_path)) == 3
    told = capsys.readouterr().err
    assert re.match(r"error: learner ended with code 3; its log does not say why \([0-9,.]+ MiB free there\)\n", told)
    assert told.rstrip("\n").endswith(log)


def test_the_launcher_says_how_often_it_has_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = Service("learner", [sys.executable, "-c", "raise ValueError('why')"], tmp_path / "learner.log", {})
    learner.start()
    assert learner.process is not None
    learner.process.wait(timeout=10)
    assert report(config(tmp_path), Outcome(1, failed=learner, gave_up=True), RunSnapshot(tmp_path)) == 1
    told = capsys.readouterr().err
    assert "learner ended with code 1 once more after 5 restarts (launch.max_restarts)" in told
    assert told.splitlines()[-1] == "ValueError: why"


def test_an_interrupted_run_says_whether_it_can_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Service("rollout_server", ["true"], tmp_path / "x.log", {})
    assert report(config(tmp_path), Outcome(130), RunSnapshot(tmp_path)) == 130
    (tmp_path / "journal.sqlite").touch()
    assert report(config(tmp_path), Outcome(130, failed=server), RunSnapshot(tmp_path)) == 130
    first, second = capsys.readouterr().out.splitlines()
    assert first == "interrupted before it had begun"
    assert second == "rollout_server was told to stop, and the run with it; the same command with --resume continues"
