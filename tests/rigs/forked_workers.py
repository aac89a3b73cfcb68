"""Workers of pytest-xdist that are forks of the process that has imported torch and transformers, as services are.

Their imports take eight seconds of processor time and are the same in each. A worker collects its tests itself.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing import process
from multiprocessing.connection import Connection
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.rigs.prefork import ForkedProcess, forget_finalizers, start_forking

MAIN = multiprocessing.current_process()
"""Main process of the Python that imports this file: of the one that forks, before it does."""


class ForkedIO(Popen2IO):
    """Pipes to a forked worker: what execnet has for a Python that it starts."""

    def __init__(self, execmodel: Any):
        orders, sent = multiprocessing.Pipe(duplex=False)
        received, answers = multiprocessing.Pipe(duplex=False)
        start_forking()
        context = multiprocessing.get_context("forkserver")
        self._process = ForkedProcess(context, _work, orders, answers, dict(os.environ), os.getcwd())
        orders.close()
        answers.close()
        pipes = os.fdopen(os.dup(sent.fileno()), "wb"), os.fdopen(os.dup(received.fileno()), "rb")
        sent.close()
        received.close()
        super().__init__(*pipes, execmodel)

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()


def fork_workers() -> None:
    """Fork the workers that this process of pytest starts."""
    gateways: Any = gateway_io
    gateways.create_io = lambda spec, execmodel: ForkedIO(execmodel)


def _work(orders: Connection, answers: Connection, environment: Mapping[str, str], folder: str) -> None:
    """Become a Python that reads its program from standard input, as execnet starts one."""
    gc.freeze()  # a collection would look at all that was imported, and so copy it
    forget_finalizers()
    for pipe, descriptor in ((orders, 0), (answers, 1)):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    processes: Any = process  # libraries ask whether they are in a child
    processes._current_process, processes._parent_process = MAIN, None
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
