"""One worker process, seen from its parent: start it, ask it, stop it with everything below it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

import asyncrl
from asyncrl.errors import UserError
from asyncrl.workers import channel
from protocol.nesting import check_depth

START_TIMEOUT_S = 120.0
"""Seconds for the imports of the user's files; torch alone can take ten on a busy machine."""
STOP_TIMEOUT_S = 10.0
"""Seconds for the reaper, which needs milliseconds; after this it is killed itself."""
EXIT_GRACE_S = 1.0
"""Seconds between the end of the reply pipe and the end of the process that held it."""
SHOWN_BYTES = 8192
"""Bytes of what a worker prints that go to the log, for each request and for loading. A reward that prints a page per
sample would else fill the disk."""
LATE_REPLY_S = 0.1
"""A busy event loop may see the time limit and the reply in one go; the reply then wins."""


@dataclass(frozen=True)
class WorkerProgram:
    """Program of a worker, and the words for it in errors."""

    module: str
    """Module that `python -m` runs, which calls `run_worker`."""
    setup: Mapping[str, Any]
    """Rest of the first message: what the module loads."""
    section: str
    """Section of the configuration that it belongs to, such as `reward`."""
    loads: str
    """Words for what it loads, such as `the reward functions`."""
    memory_limit_mib: int = 0
    """Most address space of the worker; 0 for no limit."""
    start_timeout_s: float = START_TIMEOUT_S
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables beside those of this process."""
    files: Mapping[Path, str] = field(default_factory=dict[Path, str])
    """Files of the user that every worker reads when it starts, with the hashes that they are to have."""


class WorkerDied(Exception):
    """The worker ended, or sent what no worker sends; the message says how."""

    def __init__(self, how: str, *, is_guilty: bool = False) -> None:
        super().__init__(how)
        self.is_guilty = is_guilty
        """Whether the request ran when the worker ended, and may have caused it."""


class Request:
    """A request that a worker has."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.part = ""
        """Part that the worker has begun last, where it names parts."""
        self.begun = asyncio.Event()
        """Set once the worker has begun it, and when the worker has ended."""
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def reply(self, timeout_s: float) -> dict[str, Any]:
        """The worker's reply. Raises TimeoutError, WorkerDied."""
        await asyncio.wait({self.answer}, timeout=timeout_s)
        return await asyncio.wait_for(self.answer, LATE_REPLY_S)


class WorkerProcess:
    """A process that runs user code. Made by `await WorkerProcess.start(program, on_dropped)`."""

    def __init__(self, process: asyncio.subprocess.Process, on_dropped: Callable[[int], None]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.ready: dict[str, Any] = {}
        """Answer to the first message."""
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._on_dropped = on_dropped
        self._left_to_show = SHOWN_BYTES
        self._ids = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._end = ""
        """How the worker ended."""
        self._showing = asyncio.create_task(self._show_prints(process.stderr))
        self._reading = asyncio.create_task(self._read())
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, program: WorkerProgram, on_dropped: Callable[[int], None]) -> WorkerProcess:
        """Start a process and load the program. Raises UserError, with the worker's traceback as its cause.

        `on_dropped` is called with the number of printed bytes, beyond SHOWN_BYTES, that were dropped.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", program.module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the parent's business
            env=_environment() | dict(program.variables),
        )
        worker = cls(process, on_dropped)
        try:
            await worker._load(program)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def _load(self, program: WorkerProgram) -> None:
        section, loads, timeout_s = program.section, program.loads, program.start_timeout_s
        words = {"section": section, "loads": loads, "memory_limit_mib": program.memory_limit_mib}
        try:
            with self.request({**program.setup, **words}) as request:
                reply = await request.reply(timeout_s)
        except TimeoutError:
            raise UserError(f"{loads} were not loaded after {timeout_s:.0f} s. What do they import?") from None
        except WorkerDied as died:
            raise UserError(
                f"a worker of `{section}` ended while it loaded {loads}: {died}. "
                f"Its output is in the log; {section}.memory_limit_mib may be too small for what they import"
            ) from None
        if not reply.get("ready"):
            raise UserError(str(reply.get("message"))) from WorkerDied(str(reply.get("traceback")))
        self.ready = reply

    @contextmanager
    def request(self, message: Mapping[str, Any]) -> Iterator[Request]:
        """Send a request, whose reply is awaited inside. Raises WorkerDied, and as `channel.pack`."""
        if self._end:
            raise WorkerDied(self._end)
        number, request = next(self._ids), Request(message)
        packed = channel.pack({**message, "id": number})
        self._left_to_show = SHOWN_BYTES
        self._requests[number] = request
        self._stdin.write(packed)
        try:
            yield request
        finally:
            del self._requests[number]
            if not request.answer.cancel() and not request.answer.cancelled():
                request.answer.exception()  # an error that nobody awaits any more is not logged

    @property
    def requests(self) -> list[Request]:
        """Requests without a reply that somebody awaits, oldest first."""
        return list(self._requests.values())

    @property
    def name(self) -> str:
        """Process id of the reaper, the worker's parent."""
        return str(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._stdout.at_eof() and not self._end

    def kill(self, why: str, late: Request | None = None) -> None:
        """Begin to end the worker with everything it started; nothing happens where it has ended.

        Requests fail with WorkerDied, but `late`, the one to blame, with TimeoutError.
        """
        if self._end:
            return
        self._end = why
        for request in self.requests:
            if not request.answer.done():
                died = WorkerDied(why, is_guilty=late is None and request.begun.is_set())
                request.answer.set_exception(TimeoutError(why) if request is late else died)
            request.begun.set()
        # The closing of stdin is the reaper's sign. close() would first wait until the worker has read all.
        if not self._stdin.transport.is_closing():
            self._stdin.transport.abort()

    async def stop(self) -> None:
        """Kill the worker, and return once it and all that it started are gone. May be called again."""
        self.kill("it was stopped")
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._wait_until_gone())
        await asyncio.shield(self._stopping)  # a cancelled caller must not leave processes behind

    async def _wait_until_gone(self) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        with suppress(TimeoutError):  # the last prints, of a worker that crashed
            await asyncio.wait_for(self._showing, EXIT_GRACE_S)
        await self._reading

    async def _read(self) -> None:
        """Hand replies to those that wait for them, until the worker ends."""
        messages = channel.unpacker()
        try:
            while received := await self._stdout.read(1 << 16):
                messages.feed(received)
                for message in messages:
                    check_depth(message)
                    self._take(message)
            how = await self._how_it_ended()
        except (AttributeError, KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            how = f"it sent a malformed reply ({error})"
        self.kill(how)

    def _take(self, message: dict[str, Any]) -> None:
        request = self._requests.get(message["begun"] if "begun" in message else message["id"])
        if request is None:  # it is awaited no more
            return
        request.begun.set()
        if "begun" in message:
            request.part = str(message["part"])
        elif not request.answer.done():
            request.answer.set_result(message)

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
