"""Services started by a fork of a process that has imported torch and transformers, once per test worker.

A service's imports take five seconds of processor time and are the same in every test. The started process is a real
one: its own pid, sockets, signals and exit code, and `kill -9` kills it. Tests of the start itself start Python anew.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

PRELOADED = (
    "asyncrl.launch.train",
    "learner.service",
    "learner.sft",
    "learner.training.engines.torch_engine",
    "rollout_server.service",
    "rollout_server.engines.hf.engine",
    "rollout_server.engines.scripted",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_vl.processing_qwen2_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
)
READY_S = 120.0
MESSAGE_BYTES = 1 << 16


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a process that the template has forked."""

    def __init__(self, template: Template, pid: int, args: Sequence[str]):
        self._template = template
        self.pid = pid
        self.args = list(args)
        self.stdout = self.stderr = None

    @property
    def returncode(self) -> int | None:
        return self._template.exit_codes.get(self.pid)

    def poll(self) -> int | None:
        self._template.collect(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._template.collect(min(left, 1.0))
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


Service = subprocess.Popen[str] | ForkedProcess
"""A started service, as tests use it."""


class Template:
    """This side of the process that forks: one request a start, one message an exit."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int] = {}
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.rigs.prefork", str(other.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command,
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        other.close()
        atexit.register(self.close)
        if "ready" not in self._message(READY_S):
            raise RuntimeError("the process that forks services did not start")

    def start(self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedProcess:
        request = {"module": module, "arguments": list(arguments), "log": str(log), "environment": dict(environment)}
        data = json.dumps({**request, "folder": os.getcwd()}).encode()
        assert len(data) < MESSAGE_BYTES
        self._socket.send(data)
        while True:
            message = self._message(READY_S)
            if "pid" in message:
                return ForkedProcess(self, message["pid"], [sys.executable, "-m", module, *arguments])
            self._keep(message)

    def collect(self, timeout_s: float) -> None:
        """Take the exits that have happened, after waiting for one at most so long."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            self._keep(self._message(0.0))
            timeout_s = 0.0

    def _keep(self, message: Mapping[str, int]) -> None:
        self.exit_codes[message["exited"]] = message["code"]

    def _message(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s or None)
        data = self._socket.recv(MESSAGE_BYTES)
        if not data:
            raise RuntimeError("the process that forks services has died")
        return json.loads(data)

    def close(self) -> None:
        """End the process: it leaves when this side's socket is closed, and is killed if it takes longer than that."""
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@cache
def template() -> Template:
    return Template()


def serve(control: socket.socket) -> None:
    """Fork at each request, and report each exit, until the test process has gone."""
    for module in PRELOADED:
        importlib.import_module(module)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    control.send(json.dumps({"ready": True}).encode())
    while True:
        readable, _, _ = select.select([control, wake], [], [])
        if wake in readable:
            wake.recv(4096)
            _report_exits(control)
        if control in readable:
            data = control.recv(MESSAGE_BYTES)
            if not data:
                return
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (control, wake, woken):
                    end.close()
                _become(request)
            control.send(json.dumps({"pid": pid}).encode())


def _report_exits(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(json.dumps({"exited": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: Mapping[str, Any]) -> None:
    """Run the module as `python -m` does; does not return."""
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if faults := sys.modules.get("protocol.faults"):
            faults._left = faults._armed()  # the template read its own environment
        code = _run_module(request["module"], request["arguments"])
    finally:
        os._exit(code)


def _run_module(module: str, arguments: Sequence[str]) -> int:
    """Run a module as `python -m` does, and return its exit code. A command forks its services, or becomes one."""
    code = 0
    sys.argv = [module, *arguments]
    if module == "asyncrl":
        launcher: Any = importlib.import_module("asyncrl.launch.processes")
        launcher.subprocess = SimpleNamespace(Popen=LaunchedService, DEVNULL=None, STDOUT=None)
        command: Any = importlib.import_module("asyncrl.cli")
        command._become = lambda module, *words: os._exit(_run_module(module, words))
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as crash:
        sys.excepthook(type(crash), crash, crash.__traceback__)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


class LaunchedService:
    """The part of `subprocess.Popen` that a launcher uses: its child, by a fork of it."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdout: IO[bytes],
        env: Mapping[str, str],
        preexec_fn: Callable[[], None],
        **_: Any,
    ):
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                preexec_fn()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for number in (1, 2):
                    os.dup2(stdout.fileno(), number)
                os.environ.clear()
                os.environ.update(env)
                _, _, module, *arguments = args
                code = _run_module(module, arguments)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # torch takes seconds to end
