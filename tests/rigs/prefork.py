"""Services started by a fork of a process that has imported torch and transformers, once for all test workers.

A service's imports take five seconds of processor time and are the same in every test. The started process is a real
one: its own pid, sockets, signals and exit code, and `kill -9` kills it. Tests of the start itself start Python anew.
"""

from __future__ import annotations

import gc
import importlib
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import psutil

from tests.rigs.scripted_path import FOLDER as SCRIPTED

ROOT = Path(__file__).parents[2]
RUN_FIRST = "TESTS_RUN_FIRST"
"""Variable of a file that a forked service runs before it begins, as Python does with sitecustomize.py."""
RANK_NAME = "rank {}"
"""Name of a forked rank's process: it has the command line of the one that forked."""
RANKS_ANEW = "TESTS_START_RANKS_ANEW"
"""Variable with which rank 0 starts Python for the other ranks, as it does for users, in place of a fork."""
SHARED = "TESTS_FORKS"
"""Variable of the socket on which pytest's first process tells its workers of the process that forks."""


class ForkedProcess:
    """The part of `subprocess.Popen` that tests and the launcher use, for a fork."""

    def __init__(self, context: Any, target: Callable[..., None], *arguments: object):
        self._process = context.Process(target=target, args=arguments, daemon=True)  # killed with the test process
        self._lock = Lock()
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """An exit code is read once: threads that look at the same time must not both read it."""
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired. Its sentinel would be open for as long as a fork of its own lives."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Service = subprocess.Popen[str] | ForkedProcess
"""A started service, as tests use it."""


def fork_module(
    module: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    folder: str = "",
    *,
    of_this: bool = False,
) -> ForkedProcess:
    """`python -m MODULE ARGUMENTS` in the folder, or this one; it appends what it prints to `log`. `of_this`: a fork of
    this process, for what it alone has imported."""
    context = multiprocessing.get_context("fork") if of_this else _context()
    return ForkedProcess(context, _become, module, arguments, str(log), dict(environment), folder or os.getcwd())


@cache
def _context() -> Any:
    """The process that forks is started with the first service, by the test process that shares its own if one does."""
    if address := os.environ.get(SHARED):
        with Client(address) as asked:
            served: Any = forkserver._forkserver
            served._forkserver_address, served._forkserver_alive_fd = asked.recv(), os.open(os.devnull, os.O_RDONLY)
            served.ensure_running = resource_tracker.ensure_running
    else:
        start_forking()
    return multiprocessing.get_context("forkserver")


@cache
def start_forking() -> str:
    """Start the process that forks; returns its address."""
    forkserver.set_forkserver_preload([__name__, "tests.rigs.forked_workers", "tests.rigs.preloaded"])
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with patch.dict(os.environ, {**settings, "PYTHONPATH": os.pathsep.join((str(ROOT), SCRIPTED))}):
        forkserver.ensure_running()
    served: Any = forkserver._forkserver
    return served._forkserver_address


def rank_of(process: int, rank: int) -> psutil.Process | None:
    """The forked rank among the children of a process, and theirs."""
    name = RANK_NAME.format(rank)
    found = (child for child in psutil.Process(process).children(recursive=True) if child.name() == name)
    return next(found, None)


def share_forks() -> None:
    """Let the test processes that this one starts fork from one process, which then imports once for all of them."""
    listener = Listener(family="AF_UNIX")

    def serve() -> None:
        while True:
            with listener.accept() as asked:
                asked.send(start_forking())

    os.environ[SHARED] = str(listener.address)
    Thread(target=serve, daemon=True).start()


def _become(
    module: str, arguments: Sequence[str], output: str | int, environment: Mapping[str, str], folder: str
) -> None:
    """Run the module as `python -m` does, printing to a file or descriptor; does not return."""
    code = 1
    gc.freeze()  # a collection would look at all that was imported, and so copy it
    forget_finalizers()
    this: Any = multiprocessing.current_process()
    this._config["daemon"] = False  # or it might have no children
    try:
        if isinstance(output, str):
            output = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        faults: Any = sys.modules.get("protocol.faults")
        if faults:
            faults._left = faults._armed()  # the process that forks read its own environment
        if RUN_FIRST in environment:
            runpy.run_path(environment[RUN_FIRST])
        code = _run_module(module, arguments)
    finally:
        os._exit(code)


def forget_finalizers() -> None:
    """Folders of the process that forked are its own, and torch's ends take long."""
    finalizers: Any = weakref.finalize
    for registered in list(finalizers._registry):
        registered.atexit = False


def _run_module(module: str, arguments: Sequence[str]) -> int:
    """Run a module as `python -m` does, and return its exit code. A command forks its services and stages, or becomes a
    service; torchrun forks its ranks."""
    code = 0
    sys.argv = [module, *arguments]
    if module == "asyncrl":
        launcher: Any = importlib.import_module("asyncrl.launch.processes")
        launcher.subprocess = SimpleNamespace(Popen=_launch, DEVNULL=None, STDOUT=None)
        system: Any = os
        system.execv = lambda _, words: os._exit(_run_module(words[2], words[3:]))
        if arguments[0] == "demo":
            stages: Any = importlib.import_module("asyncrl.demo.prepare")
            stages.subprocess = SimpleNamespace(call=_call)
    if RANKS_ANEW not in os.environ:
        ranks: Any = importlib.import_module("learner.ranks.processes")
        ranks.subprocess = SimpleNamespace(Popen=_launch, DEVNULL=None)
    if module == "torch.distributed.run":
        handlers: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler")
        handlers.SubprocessHandler._popen = lambda _, words, env: _torchruns_rank(words, env)
        # It seeks names for its events in the sources of all modules, which are thousands here: 1.5 s a start.
        rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
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


def _call(command: Sequence[str]) -> int:
    """Replacement of `subprocess.call` of `python -m MODULE ARGUMENTS`: its child, by a fork of this process."""
    assert command[1] == "-m", command
    here = sys.stdout.fileno(), dict(os.environ), os.getcwd()
    return ForkedProcess(multiprocessing.get_context("fork"), _become, command[2], command[3:], *here).wait()


def _torchruns_rank(words: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
    """Replacement of torchrun's `subprocess.Popen` of `python -u -m MODULE ARGUMENTS`: its child, by a fork of it."""
    assert words[1:3] == ("-u", "-m"), words
    return _fork(words[1:], environment)


def _launch(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    preexec_fn: Callable[[], None],
    stdout: IO[bytes] | None = None,
    **_: Any,
) -> ForkedProcess:
    """Replacement of the `subprocess.Popen` of the launcher, and of rank 0: its child, by a fork of it."""
    return _fork(args, env, stdout.fileno() if stdout else 1, preexec_fn)


def _fork(
    words: Sequence[str], environment: Mapping[str, str], output: int = 1, prepare: Callable[[], None] | None = None
) -> ForkedProcess:
    """`python -m MODULE ARGUMENTS` in a session of its own, with the handlers of signals that Python starts with."""

    def begin() -> None:
        os.setsid()
        if prepare:
            prepare()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if rank := environment.get("RANK"):
            Path("/proc/self/comm").write_text(RANK_NAME.format(rank))
        _become(words[2], words[3:], output, environment, os.getcwd())

    return ForkedProcess(multiprocessing.get_context("fork"), begin)
