"""One worker process, seen from its user: start it, ask it, stop it with everything below it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

import asyncrl
from asyncrl.errors import UserError
from asyncrl.rewards import channel

START_TIMEOUT_S = 120.0
"""Seconds for the imports of the user's files; torch alone can take ten on a busy machine."""
STOP_TIMEOUT_S = 10.0
"""Seconds for the reaper, which needs milliseconds; after this it is killed itself."""
EXIT_GRACE_S = 1.0
"""Seconds between the end of the reply pipe and the end of the process that held it."""
SHOWN_BYTES = 8192
"""Bytes of what a worker prints that go to the log, for each sample and for loading. A reward that prints a page per
sample would else fill the disk."""
LATE_REPLY_S = 0.1
"""A busy event loop may see the time limit and the reply in one go; the reply then wins."""


class WorkerDied(Exception):
    """The worker ended, or sent what no worker sends; the message says how."""


class WorkerProcess:
    """A process that scores or runs episodes. Made by `await WorkerProcess.start(setup)`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_dropped: Callable[[int], None],
        max_reply_bytes: int = channel.MAX_REPLY_BYTES,
    ) -> None:
        self._messages = channel.unpacker(max_bytes=max_reply_bytes)
        self.begun = ""
        """Name of the component that the worker began last for the latest request; empty before the first."""
        self.ready: dict[str, Any] = {}
        """Answer to the first message."""
        self._stopping: asyncio.Task[None] | None = None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._on_dropped = on_dropped
        self._left_to_show = SHOWN_BYTES
        self._showing = asyncio.create_task(self._show_prints(process.stderr))
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(
        cls,
        setup: bytes,
        on_dropped: Callable[[int], None],
        module: str = "asyncrl.rewards.worker",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
        section: str = "reward",
        loads: str = "the reward functions",
        max_reply_bytes: int = channel.MAX_REPLY_BYTES,
    ) -> WorkerProcess:
        """Start a process and load what the packed first message names. Raises UserError, which names the `section` of
        the configuration and what the process `loads`; WorkerDied with its traceback, if it sends one, is the cause.

        `on_dropped` is called with the number of printed bytes, beyond SHOWN_BYTES, that were dropped.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the pool's business
            env=_environment() | dict(environment or {}),
        )
        worker = cls(process, on_dropped, max_reply_bytes)
        try:
            await worker._load(setup, timeout_s, section, loads)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def _load(self, setup: bytes, timeout_s: float, section: str, loads: str) -> None:
        try:
            reply = await self.ask(setup, timeout_s)
        except TimeoutError:
            raise UserError(f"{loads} were not loaded after {timeout_s:.0f} s. What do they import?") from None
        except WorkerDied as died:
            raise UserError(
                f"a worker of `{section}` ended while it loaded {loads}: {died}. "
                f"Its output is in the log; {section}.memory_limit_mib may be too small for what they import"
            ) from None
        if not reply.get("ready"):
            cause = WorkerDied(reply["traceback"]) if "traceback" in reply else None
            raise UserError(str(reply.get("message"))) from cause
        self.ready = reply

    async def ask(self, frame: bytes, timeout_s: float) -> dict[str, Any]:
        """Send one packed message and return the reply. Raises TimeoutError, WorkerDied."""
        self.send(frame)
        reading = asyncio.create_task(self.receive())
        try:
            await asyncio.wait({reading}, timeout=timeout_s)
            return await asyncio.wait_for(reading, LATE_REPLY_S)
        finally:
            reading.cancel()

    def send(self, frame: bytes) -> None:
        """Send one packed message. Its reply is received."""
        self.begun = ""
        self._left_to_show = SHOWN_BYTES
        self._stdin.write(frame)

    async def receive(self) -> dict[str, Any]:
        """The next reply. Raises WorkerDied."""
        while True:
            try:
                for message in self._messages:
                    if "begun" not in message:
                        return message
                    self.begun = str(message["begun"])
                received = await self._stdout.read(1 << 16)
                self._messages.feed(received)
            except (TypeError, ValueError, msgpack.UnpackException) as error:
                raise WorkerDied(f"it sent a malformed reply ({error})") from None
            if not received:
                raise WorkerDied(await self._how_it_ended())

    @property
    def name(self) -> str:
        """Process id of the reaper, the worker's parent."""
        return str(self._process.pid)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._stdout.at_eof() and self._stopping is None

    async def _how_it_ended(self) -> str:
        """Description of the worker's end, for an error message."""
        try:
            code = await asyncio.wait_for(self._process.wait(), EXIT_GRACE_S)
        except TimeoutError:
            return "it closed its reply pipe"
        if code >= 0:
            return f"it exited with code {code}"
        name = signal.Signals(-code).name
        hint = " (by itself, or as the machine is out of memory)" if name == "SIGKILL" else ""
        return f"it was killed by {name}{hint}"

    async def stop(self) -> None:
        """Return once the worker and all that it started are gone. May be called again."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)  # a cancelled caller must not leave processes behind

    async def _stop(self) -> None:
        # The closing of stdin is the reaper's sign. close() would first wait until the worker has read all.
        if not self._stdin.transport.is_closing():
            self._stdin.transport.abort()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        with suppress(TimeoutError):  # the last prints, of a worker that crashed
            await asyncio.wait_for(self._showing, EXIT_GRACE_S)

    async def _show_prints(self, prints: asyncio.StreamReader) -> None:
        """Copy the worker's prints to stderr, as far as they may be shown, until it ends; always read, so that it never
        blocks on a full pipe."""
        while printed := await prints.read(1 << 16):
            shown = printed[: self._left_to_show]
            self._left_to_show -= len(shown)
            with suppress(OSError):  # of a full disk, which must not block the worker
                os.write(2, shown)
                if shown and len(shown) < len(printed):
                    os.write(2, b"\n")
            if len(shown) < len(printed):
                self._on_dropped(len(printed) - len(shown))


def _environment() -> dict[str, str]:
    paths = [str(Path(asyncrl.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # A fixed hash seed gives sets one order in every worker, so a score never depends on the worker.
    return os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
