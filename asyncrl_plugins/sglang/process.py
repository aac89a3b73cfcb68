"""The processes of one SGLang server: started, watched, and ended with us."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import UserError
from rollout_server.engines.base import EngineDied

ENTRY = Path(__file__).with_name("launch.py")
SHUTDOWN_S = 10.0
"""Wait for the end of processes that were killed."""
CHECK_EVERY_S = 0.5
HEALTH_S = 5.0
LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine, whatever proxy the environment names."""
SAY_EVERY_S = 60.0
TAIL_BYTES = 4096
"""Last output that goes into the reason for an end."""
REFUSED_ARGUMENTS = 2
"""Exit code of Python's argparse."""
logger = logging.getLogger(__name__)


class SGLangProcess:
    """`launch_server` as the leader of a process group of its own. Its output goes to our standard error."""

    def __init__(self, python: Path, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tail = b""
        self._stops = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def problem(self) -> str:
        """The reason for which it has ended by itself, with its last words; empty while it runs."""
        if self._process is None or self._process.returncode is None or self._stops:
            return ""
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"SGLang's server {how}. Its last output:\n{self._tail.decode(errors='replace').strip()}"

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; it does not answer yet."""
        self._process = await asyncio.create_subprocess_exec(
            str(self._python),
            str(ENTRY),
            *arguments,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read())

    async def wait_for_answer(self, limit_s: float) -> None:
        """Raises UserError where it takes no such arguments, and EngineDied where it ends or takes too long."""
        assert self._process is not None, "start() comes first"
        assert self._reading is not None
        began = said = time.monotonic()
        while not await asyncio.to_thread(self._answers):
            now = time.monotonic()
            if self._process.returncode is not None:
                await self._reading  # to its last line
                if self._process.returncode == REFUSED_ARGUMENTS:
                    raise UserError(f"SGLang refuses its arguments, such as rollout.engine_args. {self.problem}")
                raise EngineDied(self.problem)
            if now - began > limit_s:
                raise EngineDied(f"SGLang has not started in {limit_s:g} s (network.start_timeout_s)")
            if now - said > SAY_EVERY_S:
                said = now
                logger.info("SGLang has been starting for %.0f s; %g s at most", now - began, limit_s)
            await asyncio.sleep(CHECK_EVERY_S)
        logger.info("SGLang answers at %s after %.0f s (process %d)", self.url, time.monotonic() - began, self.pid)

    def _answers(self) -> bool:
        try:
            with LOOPBACK.open(f"{self.url}/health", timeout=HEALTH_S) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    async def _read(self) -> None:
        """Pass its output on, so that it never waits for us, and keep the end of it."""
        assert self._process is not None
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(1 << 16):
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
            with suppress(OSError, ValueError):
                sys.stderr.buffer.write(piece)
                sys.stderr.buffer.flush()

    async def wait_for_end(self, limit_s: float) -> None:
        """Return when it has ended and all it said was read, or after `limit_s`."""
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._process.wait()
                    if self._reading is not None:
                        await asyncio.shield(self._reading)

    async def stop(self) -> None:
        """Kill the whole process group. There is nothing to save, and in order SGLang ends in 5 s at the earliest."""
        if self._process is None:
            return
        self._stops = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait_for_end(SHUTDOWN_S)
