"""A service ends with the exit code and the reason of its ending, whatever else is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import ExitCode
from asyncrl.run_folder.failure import FAILURE_FILE, RESERVED_FILE, read_failure

CONFIG = """\
run_dir: {run_dir}
model: {{path: nowhere, dtype: float32}}
data: {{train_files: [rows.parquet]}}
reward: {{functions: [{{function: exact_match}}]}}
"""
SERVICE = """
import errno, os, sqlite3, sys
from asyncrl.service_entry import run_service
from asyncrl.errors import BadStateError, RunTakenError, UserError, WaitTimeoutError
def main(config, resume):
    {body}
run_service({name!r}, main)
"""


FORKS = """
import json, os, signal, sys
import asyncrl.config.load, asyncrl.service_entry, torch
for line in iter(sys.stdin.readline, ""):
    order = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(30)
        for number, file in enumerate(order["files"]):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
        sys.argv = ["-c", *order["arguments"]]
        exec(order["script"], {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Each service is a fork of a Python that has imported what a service begins with. It ends as any Python does."""


_forking: list[subprocess.Popen[str]] = []


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        _forking.append(process)
        yield
        _forking.clear()


def written(tmp_path: Path, body: str, name: str) -> str:
    """The service, and its configuration in `tmp_path/config.yaml`."""
    (tmp_path / "config.yaml").write_text(CONFIG.format(run_dir=tmp_path / "run"))
    return SERVICE.format(body=body, name=name)


def run_service(
    tmp_path: Path, body: str, name: str = "rollout_server", *arguments: str
) -> subprocess.CompletedProcess[str]:
    """A service whose `main` is `body`, with `tmp_path/run` as its run directory."""
    script, command = written(tmp_path, body, name), ["--config", str(tmp_path / "config.yaml"), *arguments]
    (process,) = _forking
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        order = {"script": script, "arguments": command, "files": [os.devnull, str(out), str(err)]}
        print(json.dumps(order), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


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
        "os.write(os.open('/dev/full', os.O_WRONLY), b'1')",
        "sqlite3.connect(':memory:').executescript('PRAGMA max_page_count=2; CREATE TABLE t AS SELECT zeroblob(9999)')",
    ],
)
def test_a_full_disk_is_bad_state_that_names_the_directory_and_its_free_space(tmp_path: Path, body: str) -> None:
    done = run_service(tmp_path, body, "rollout_server", "--failure-file", f"{tmp_path}/why.json")
    assert done.returncode == ExitCode.BAD_STATE, done.stderr
    saved = read_failure(tmp_path, "why.json")
    assert saved is not None
    assert (saved.service, saved.kind, saved.step) == ("rollout_server", "disk_full", None)
    assert re.search(rf"the disk of {tmp_path}/?(run)? is full .*MiB free", saved.reason)
    assert done.stderr.splitlines()[-1] == f"error: {saved.reason}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", ExitCode.FINISHED),
        ("raise RuntimeError('unforeseen')", ExitCode.CRASHED),
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


BARS = """
    import subprocess, tqdm
    from huggingface_hub.utils import tqdm as of_the_hub
    from transformers.utils import logging
    for bar in (tqdm.tqdm, of_the_hub, logging.tqdm):
        assert list(bar(range(3), desc="Loading weights")) == [0, 1, 2]
    code = "import tqdm; print(*tqdm.tqdm(range(3), desc='Writing model shards'))"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_libraries_of_a_service_and_of_its_children_draw_no_progress_bars(tmp_path: Path) -> None:
    """Python starts anew: a fork's libraries have been imported before the service."""
    command = [sys.executable, "-c", written(tmp_path, BARS.strip(), "rollout_server")]
    command += ["--config", f"{tmp_path}/config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1 2\n"
    assert done.stderr == ""


@pytest.mark.parametrize("error", ["BadStateError", "UserError"])
def test_a_service_writes_nothing_into_a_run_that_it_does_not_hold(tmp_path: Path, error: str) -> None:
    """A server by itself, and a learner that was refused: the run is another's, and may be at work."""
    run = tmp_path / "run"
    run.mkdir()
    for name in (FAILURE_FILE, RESERVED_FILE):
        (run / name).write_text("of the other")
    assert run_service(tmp_path, f"raise {error}('why')").returncode != 0
    contents = {file.name: file.read_text() for file in run.glob("*")}
    assert contents == dict.fromkeys((FAILURE_FILE, RESERVED_FILE), "of the other")


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("pass", ExitCode.FINISHED, ""),
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
    done = run_service(tmp_path, body)
    assert done.returncode == code, done.stderr
    assert done.stdout == "thread handler\n", "what the process has to do is done, and flushed"
    assert (done.stderr.splitlines() or [""])[-1] == last


def test_a_log_on_a_full_disk_changes_no_exit_code(tmp_path: Path) -> None:
    """Else the launcher would start again what would fail again."""
    body = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2); raise BadStateError('why')"
    assert run_service(tmp_path, body).returncode == ExitCode.BAD_STATE


def test_an_exit_handler_that_hangs_does_not_keep_a_service(tmp_path: Path) -> None:
    body = "import atexit, time; print('said'); atexit.register(time.sleep, 60); raise BadStateError('the loss is nan')"
    began = time.monotonic()
    done = run_service(tmp_path, body)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_STATE, "said\n"), done.stderr
    assert time.monotonic() - began < 20
