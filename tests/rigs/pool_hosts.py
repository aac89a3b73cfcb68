"""A real `asyncrl pool` on loopback, for one test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.rigs.ports import own_port
from tests.rigs.prefork import Service
from tests.rigs.two_processes import start_command
from tests.rigs.waiting import wait_until


class PoolProcess:
    """The service on a port of its own, which it can be started at again."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = own_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.log = folder / "pool.log"
        self._folder, self._arguments = folder, arguments
        self._service: Service | None = None

    def start(self) -> None:
        self._service = start_command("pool", "--port", str(self.port), *self._arguments, log=self.log)
        wait_until(lambda: self.log.exists() and "listening at" in self.log.read_text(), "the pool", self._folder)

    def workers(self) -> set[psutil.Process]:
        """Processes below it, of which two are a worker and its reaper."""
        assert self._service is not None
        return set(psutil.Process(self._service.pid).children(recursive=True))

    def kill(self) -> None:
        """As `kill -9`; its workers end with it."""
        assert self._service is not None
        below = self.workers()
        os.kill(self._service.pid, signal.SIGKILL)
        self._service.wait(10)
        wait_until(lambda: not [p for p in below if p.is_running()], "its workers to end")

    def end(self) -> int:
        """Ask it to end; its exit code. No worker is left."""
        assert self._service is not None
        if self._service.poll() is not None:
            return self._service.wait()
        below = self.workers()
        self._service.terminate()
        code = self._service.wait(20)
        assert not [p for p in below if p.is_running()]
        return code


@contextmanager
def pool_process(folder: Path, *arguments: str) -> Iterator[PoolProcess]:
    pool = PoolProcess(folder, *arguments)
    pool.start()
    try:
        yield pool
    finally:
        pool.end()
