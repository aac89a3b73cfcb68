"""Bad state ends a service with code 3 and a reason in the run directory, whatever else is broken."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import ExitCode
from asyncrl.launch.processes import Service
from asyncrl.launch.story import Story
from asyncrl.launch.supervisor import Outcome
from asyncrl.launch.train import report
from asyncrl.telemetry.failure import (
    FAILURE_FILE,
    Kind,
    describe_full_disk,
    failure_of,
    forget_failure,
    forget_vain_attempt,
    is_disk_full,
    read_failure,
    release,
    reserve,
    save_failure,
)
from asyncrl.telemetry.recorder import STATUS_FILE

CONFIG = """\
run_dir: {run_dir}
model: {{path: nowhere}}
data: {{train_files: [rows.parquet]}}
reward: {{functions: [{{function: exact_match}}]}}
"""
SERVICE = """
import errno, os, sqlite3, sys
from asyncrl.entry import run_service
from asyncrl.errors import BadStateError, ResumeRefusedError, RunTakenError, UserError, WaitTimeoutError
def main(config, resume):
    {body}
run_service({name!r}, main, leave={leave})
"""


def run_service(
    tmp_path: Path, body: str, name: str = "learner", *, leave: bool = False
) -> subprocess.CompletedProcess[str]:
    """A service whose `main` is `body`, with `tmp_path/run` as its run directory."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(run_dir=tmp_path / "run"))
    (tmp_path / "run").mkdir(exist_ok=True)
    command = [sys.executable, "-c", SERVICE.format(body=body, name=name, leave=leave), "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_bad_state_is_saved_with_its_reason_and_the_last_known_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"step": 7}')
    done = run_service(tmp_path, "raise BadStateError('the loss is nan')")
    assert done.returncode == ExitCode.BAD_STATE
    assert done.stderr.splitlines()[-1] == "error: the loss is nan"
    saved = read_failure(tmp_path / "run")
    assert saved is not None
    assert (saved.service, saved.kind, saved.reason, saved.step) == ("learner", "bad_state", "the loss is nan", 7)
    assert abs(saved.time - time.time()) < 30
    assert set(os.listdir(tmp_path / "run")) == {"status.json", FAILURE_FILE}


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
    done = run_service(tmp_path, body, "rollout_server")
    assert done.returncode == ExitCode.BAD_STATE, done.stderr
    saved = read_failure(tmp_path / "run")
    assert saved is not None
    assert (saved.service, saved.kind, saved.step) == ("rollout_server", "disk_full", None)
    assert f"the disk of {tmp_path / 'run'} is full" in saved.reason
    assert "MiB free" in saved.reason
    assert done.stderr.splitlines()[-1] == f"error: {saved.reason}"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", ExitCode.FINISHED),
        ("raise RuntimeError('unforeseen')", ExitCode.CRASHED),
        ("raise OSError(errno.ECONNRESET, 'gone')", ExitCode.CRASHED),
        ("raise RunTakenError('another run')", ExitCode.USER_ERROR),
        ("raise ResumeRefusedError('other data')", ExitCode.USER_ERROR),
        ("raise KeyboardInterrupt", ExitCode.INTERRUPTED),
    ],
)
def test_other_endings_have_their_code_and_leave_nothing_in_the_run_directory(
    tmp_path: Path, body: str, code: ExitCode
) -> None:
    done = run_service(tmp_path, body)
    assert done.returncode == code, done.stderr
    assert os.listdir(tmp_path / "run") == []
    assert ("Traceback" in done.stderr) == (code is ExitCode.CRASHED)


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


def test_an_exit_handler_that_hangs_does_not_keep_a_service(tmp_path: Path) -> None:
    body = "import atexit, time; print('said'); atexit.register(time.sleep, 60); raise BadStateError('the loss is nan')"
    began = time.monotonic()
    done = run_service(tmp_path, body, leave=True)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_STATE, "said\n"), done.stderr
    assert time.monotonic() - began < 20


def test_a_mistake_of_the_user_is_saved_where_there_is_a_run(tmp_path: Path) -> None:
    done = run_service(tmp_path, "raise UserError('mend it')")
    assert done.returncode == ExitCode.USER_ERROR
    saved = read_failure(tmp_path / "run")
    assert saved is not None
    assert (saved.service, saved.kind, saved.reason) == ("learner", "user_error", "mend it")
    save_failure(tmp_path / "run", "rollout_server", "refused", kind="user_error")
    assert read_failure(tmp_path / "run") == saved
    save_failure(tmp_path / "run", "rollout_server", "the cause")
    replaced = read_failure(tmp_path / "run")
    assert replaced is not None
    assert replaced.reason == "the cause"


@pytest.mark.parametrize("kind", ["bad_state", "disk_full"])
def test_a_wait_that_ran_out_is_not_the_cause_of_what_comes_later(tmp_path: Path, kind: Kind) -> None:
    """Of a server that was up long before its learner, which `--unattended` must not repeat after bad state."""
    save_failure(tmp_path, "rollout_server", "refused", kind="user_error")
    for reason in ("no learner answered", "the consequence"):
        save_failure(tmp_path, "rollout_server", reason, kind="timed_out")
    found = read_failure(tmp_path)
    assert found is not None
    assert found.reason == "no learner answered"
    save_failure(tmp_path, "learner", "the loss is nan", kind=kind)
    save_failure(tmp_path, "rollout_server", "the learner has been gone for 600 s", kind="timed_out")
    found = read_failure(tmp_path)
    assert found is not None
    assert found.reason == "the loss is nan"


def test_the_reason_is_saved_on_a_disk_that_is_full(tmp_path: Path) -> None:
    """No new block is needed: the file that was reserved is filled in place and renamed."""
    reserve(tmp_path, "learner")
    (reserved,) = tmp_path.iterdir()
    before = (reserved.stat().st_ino, reserved.stat().st_blocks)
    save_failure(tmp_path, "learner", "\N{EURO SIGN}" * 5000, kind="disk_full")
    after = (tmp_path / FAILURE_FILE).stat()
    assert (after.st_ino, after.st_blocks) == before
    saved = read_failure(tmp_path)
    assert saved is not None
    assert saved.reason == "\N{EURO SIGN}" * 1500


def test_the_first_reason_stays_and_only_what_was_found_at_the_start_is_forgotten(tmp_path: Path) -> None:
    save_failure(tmp_path, "learner", "the cause")
    save_failure(tmp_path, "rollout_server", "the consequence")
    found = failure_of(tmp_path, "learner")
    assert found is not None
    assert found.reason == "the cause"
    forget_failure(tmp_path, failure_of(tmp_path, "rollout_server"))
    assert read_failure(tmp_path) == found
    forget_failure(tmp_path, found)
    assert list(tmp_path.iterdir()) == []
    save_failure(tmp_path, "rollout_server", "came since")
    forget_failure(tmp_path, found)
    assert failure_of(tmp_path, "rollout_server") is not None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RunTakenError('another run')", "the loss is nan"),
        ("raise ResumeRefusedError('other data')", "the loss is nan"),
        ("raise KeyboardInterrupt", "the loss is nan"),
        ("raise UserError('mend it')", "the loss is nan"),
        ("raise WaitTimeoutError('nobody came')", "the loss is nan"),
        ("raise BadStateError('the gradient is inf')", "the gradient is inf"),
    ],
)
def test_a_refusal_leaves_the_reason_of_before_and_a_failure_takes_its_place(
    tmp_path: Path, body: str, reason: str
) -> None:
    assert run_service(tmp_path, "raise BadStateError('the loss is nan')").returncode == ExitCode.BAD_STATE
    run_service(tmp_path, body)
    saved = read_failure(tmp_path / "run")
    assert saved is not None
    assert saved.reason == reason
    assert os.listdir(tmp_path / "run") == [FAILURE_FILE]


def test_a_server_that_starts_forgets_a_vain_attempt_and_no_bad_state(tmp_path: Path) -> None:
    save_failure(tmp_path, "rollout_server", "nobody came", kind="timed_out")
    forget_vain_attempt(tmp_path, "rollout_server")
    assert read_failure(tmp_path) is None
    save_failure(tmp_path, "rollout_server", "the loss is nan")
    forget_vain_attempt(tmp_path, "rollout_server")
    assert read_failure(tmp_path) is not None


def test_a_vain_wait_is_no_failure_of_a_finished_run(tmp_path: Path) -> None:
    for phase, saved in (("finished", False), ("training", True)):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / STATUS_FILE).write_text(json.dumps({"phase": phase}))
        done = run_service(tmp_path, "raise WaitTimeoutError('nobody came')", "rollout_server")
        assert done.returncode == ExitCode.BAD_STATE
        assert (read_failure(tmp_path / "run") is not None) == saved


def test_who_is_refused_leaves_what_the_other_has_reserved(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for reserved in (False, True):
        if reserved:
            reserve(tmp_path / "run", "learner")
        assert run_service(tmp_path, "raise RunTakenError('another run')").returncode == ExitCode.USER_ERROR
        assert any((tmp_path / "run").iterdir()) == reserved


def test_a_run_directory_that_cannot_be_written_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert save_failure(tmp_path / "file" / "run", "learner", "the loss is nan") is None
    assert "could not be saved" in caplog.text
    release(tmp_path / "nowhere", "learner")
    assert read_failure(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"reason": "x"}'])
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
        save_failure(tmp_path, "learner", "the loss is nan" if saved == "now" else "of before")
    if saved == "earlier":
        since = time.time()
    assert report(config(tmp_path), Outcome(3, failed=learner), Story(tmp_path, since=since)) == 3
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "error: the loss is nan"
    assert len(told) == (2 if saved == "now" else 1)
    if saved == "now":
        assert str(tmp_path / FAILURE_FILE) in told[1]
        assert json.loads((tmp_path / FAILURE_FILE).read_text())["service"] == "learner"


def test_the_launcher_says_how_often_it_has_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = Service("learner", [sys.executable, "-c", "raise ValueError('why')"], tmp_path / "learner.log", {})
    learner.start()
    assert learner.process is not None
    learner.process.wait(timeout=10)
    assert report(config(tmp_path), Outcome(1, failed=learner, gave_up=True), Story(tmp_path)) == 1
    told = capsys.readouterr().err
    assert "learner ended with code 1 once more after 5 restarts (launch.max_restarts)" in told
    assert told.splitlines()[-1] == "ValueError: why"


def test_an_interrupted_run_says_whether_it_can_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Service("rollout_server", ["true"], tmp_path / "x.log", {})
    assert report(config(tmp_path), Outcome(130), Story(tmp_path)) == 130
    (tmp_path / "journal.sqlite").touch()
    assert report(config(tmp_path), Outcome(130, failed=server), Story(tmp_path)) == 130
    first, second = capsys.readouterr().out.splitlines()
    assert first == "interrupted before it had begun"
    assert second == "rollout_server was told to stop, and the run with it; the same command with --resume continues"
