"""`WorkerPool`: worker processes that are started together, take requests side by side, and are replaced when lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from asyncrl.errors import BadStateError, UserError
from asyncrl.user_functions import hashes_of
from asyncrl.workers.process import SHOWN_BYTES, WorkerProcess, WorkerProgram

logger = logging.getLogger(__name__)

START_TRIES = 3
"""Starts of a lost worker that may fail one after the other; then the run stops."""
BACK_OFF_S = 0.5
"""Seconds before the second of them; twice as long before the third."""


class WorkerPool:
    """Workers with some places each, for the event loop that called `start()`.

    Example:
        pool = WorkerPool(workers=2)
        await pool.start(program)
        worker = await pool.take()
        try:
            with worker.request({"text": "4"}) as request:
                reply = await request.reply(timeout_s=5.0)
        finally:
            pool.give_back(worker)
        await pool.close()

    Who takes a place waits for it in order of arrival. The processes end with the thread that runs the loop, also where
    it is killed.
    """

    def __init__(self, workers: int, places: int = 1) -> None:
        """`places`: number of places of each worker."""
        self._number = workers
        self._places = places
        self._program: WorkerProgram | None = None
        self._free: asyncio.Queue[WorkerProcess | Exception] = asyncio.Queue()
        """Free places, as the worker that each belongs to; an error that ends the pool."""
        self._workers: set[WorkerProcess] = set()
        self._replacing: dict[WorkerProcess, asyncio.Task[None]] = {}
        """Tasks that replace lost workers."""
        self._closed = False
        self.ready: dict[str, Any] = {}
        """Answer of the workers to the first message. Known after `start()`."""
        self.restarts = 0
        """Workers that were started in place of lost ones."""
        self.dropped_bytes = 0
        """Bytes that workers printed beyond SHOWN_BYTES per request, which no log has."""

    async def start(self, program: WorkerProgram) -> None:
        """Start the workers, with their program loaded. Raises UserError where they cannot be."""
        self._program = program
        started = await asyncio.gather(*(self._start() for _ in range(self._number)), return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                await self.close()
                raise failure
        workers = [worker for worker in started if isinstance(worker, WorkerProcess)]
        self.ready = workers[0].ready
        for _ in range(self._places):  # the first requests are spread over all workers
            for worker in workers:
                self._free.put_nowait(worker)

    async def take(self) -> WorkerProcess:
        """A free place of a worker that is alive; `give_back` is due.

        Raises BadStateError where a lost worker does not start again, RuntimeError after `close()`.
        """
        while True:
            worker = await self._free.get()
            if isinstance(worker, Exception):
                self._free.put_nowait(worker)  # for the next one that waits
                raise worker
            if worker.is_alive:
                return worker
            self._replace_if_lost(worker)  # its place is gone, and comes back with its successor

    def give_back(self, worker: WorkerProcess) -> None:
        """Free a place."""
        if worker.is_alive:
            self._free.put_nowait(worker)
        self._replace_if_lost(worker)

    def check_open(self) -> None:
        """Raise RuntimeError after `close()`, which explains a worker's end."""
        if self._closed:
            raise RuntimeError("the worker pool is closed")

    async def close(self) -> None:
        """Kill the workers and everything that they started."""
        self._closed = True
        replacing = list(self._replacing.values())
        for task in replacing:
            task.cancel()
        await asyncio.gather(*replacing, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._workers.clear()
        while not self._free.empty():
            self._free.get_nowait()
        self._free.put_nowait(RuntimeError("the worker pool is closed"))

    async def _start(self) -> WorkerProcess:
        """Raises UserError, BadStateError for a file that is not what the others have read."""
        assert self._program is not None
        now = await asyncio.to_thread(hashes_of, self._program.files)
        if changed := [str(path) for path, known in self._program.files.items() if now[path] != known]:
            raise BadStateError(
                f"a worker of `{self._program.section}` has to start again, and {', '.join(changed)} changed since the "
                f"run began: {self._program.loads} would not be the same. Undo the change and resume the run, or "
                "accept it with --resume --accept-changes"
            )
        worker = await WorkerProcess.start(self._program, self._count_dropped)
        self._workers.add(worker)
        return worker

    def _replace_if_lost(self, worker: WorkerProcess) -> None:
        is_ours = worker in self._workers and worker not in self._replacing
        if is_ours and not worker.is_alive and not self._closed:
            self._replacing[worker] = asyncio.create_task(self._replace(worker))

    async def _replace(self, lost: WorkerProcess) -> None:
        try:
            await lost.stop()
            self._workers.discard(lost)
            worker = await self._start_again()
        except Exception as error:  # any error must reach those that wait for a place
            self._free.put_nowait(error if isinstance(error, BadStateError) else BadStateError(str(error)))
            return
        finally:
            del self._replacing[lost]
        self.restarts += 1
        for _ in range(self._places):
            self._free.put_nowait(worker)

    async def _start_again(self) -> WorkerProcess:
        """Raises BadStateError with the traceback of the last failure."""
        assert self._program is not None
        failure: UserError | None = None
        for failures in range(START_TRIES):
            if failures:
                await asyncio.sleep(BACK_OFF_S * 2 ** (failures - 1))
            try:
                worker = await self._start()
            except UserError as error:
                failure = error
                continue
            if worker.ready != self.ready:
                raise BadStateError(f"{self._program.loads} have changed since the run began. Start a new run")
            return worker
        told = f"{failure}\n{failure.__cause__}" if failure and failure.__cause__ else str(failure)
        raise BadStateError(
            f"{START_TRIES} times one after the other, a lost worker of `{self._program.section}` could not be started "
            f"again: {told}"
        )

    def _count_dropped(self, nbytes: int) -> None:
        if not self.dropped_bytes and self._program is not None:
            logger.warning(
                "%s printed more than %d bytes for one request: what is beyond is dropped. Let it write "
                "to a file of its own to keep all",
                self._program.loads,
                SHOWN_BYTES,
            )
        self.dropped_bytes += nbytes
