"""The way to a pool of another machine: worker processes there, asked as those of this machine are.

What is lost with the connection is lost as a process that crashed, and is started again when the pool is back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import platform
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq.asyncio

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.errors import UserError, WaitTimeoutError
from asyncrl.rewards.worker_process import STOP_TIMEOUT_S, Worker
from protocol.curve import POOL_PUBLIC, KeyFileError, read_server_keys
from protocol.curve_auth import HandshakeRejected
from protocol.endpoints import BindError
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    Error,
    FromPool,
    Goodbye,
    Message,
    PoolHeartbeat,
    PoolHello,
    PoolWelcome,
    ProcessData,
    ProcessEnded,
    ProcessStart,
    ProcessStarted,
    ProcessStop,
    Refusal,
    Wire,
    WorkerKind,
)
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from protocol.stalls import SLOWEST_TURN_S, Stalls

logger = logging.getLogger(__name__)

HELLO_EVERY_S = 1.0
LOOK_EVERY_S = 0.5
FIRST_WAIT_S = 300.0
"""Wait for a pool that has not answered yet, where network.start_timeout_s is 0."""
MEETING_S = 3.0
"""Time for the other pools, after the first one has answered, until the first processes are spread."""
PLACE_WAIT_S = 90.0
"""Time for the pool to have a free place: longer than it waits for one itself."""
START_TRIES = 5
"""Starts that may end with the pool, one after the other."""
BACK_OFF_S = 1.0
"""Seconds before the second of them; twice as long before each further one."""


class PoolLostError(UserError):
    """A pool went away while it started a process; another attempt may succeed."""


class RemoteWorker(Worker):
    """A process of a pool. Made by `Pools.start`."""

    def __init__(self, connection: PoolConnection, number: int, max_reply_bytes: int) -> None:
        super().__init__(max_reply_bytes)
        self._connection = connection
        self._number = number
        self._most_bytes = max_reply_bytes
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._queued_bytes = 0
        self._end = ""
        self.started = asyncio.Event()
        """True after a start, even where the process has ended since."""
        self._gone = asyncio.Event()
        self.lost_with_pool = False

    @property
    def name(self) -> str:
        return f"{self._number} at {self._connection.endpoint}"

    @property
    def alive(self) -> bool:
        return not self._end and self._stopping is None

    def write(self, frame: bytes) -> None:
        self._connection.post(ProcessData(process=self._number, data=memoryview(frame)), self)

    async def read(self) -> bytes:
        data = await self._answers.get()
        self._queued_bytes -= len(data)
        if not data:
            self._answers.put_nowait(b"")  # for whoever reads next
        return data

    async def how_it_ended(self) -> str:
        return f"{self._end} (at the pool {self._connection.endpoint})"

    def take(self, data: memoryview) -> None:
        """The pool's next bytes of its answers."""
        if self._end:
            return
        self._queued_bytes += data.nbytes
        if self._queued_bytes > self._most_bytes:
            self.lose(f"it answered {self._queued_bytes:,} bytes that nobody had asked for")
            return
        self._answers.put_nowait(bytes(data))

    def lose(self, how: str, *, gone: bool = False) -> None:
        """Give the worker up; `gone`: it has ended or cannot be reached."""
        if not self._end:
            self._end = how
            self._answers.put_nowait(b"")
            self.started.set()
        if gone:
            self._gone.set()

    @property
    def has_ended(self) -> bool:
        return bool(self._end)

    async def _stop(self) -> None:
        if not self._gone.is_set():
            self._connection.post(ProcessStop(process=self._number), self)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), 2 * STOP_TIMEOUT_S)
        self.lose("it was stopped", gone=True)
        self._connection.forget(self._number)


class PoolConnection:
    """Processes at one pool, for the event loop that calls `open`.

    It dials, says hello and beats by itself, again and again, from `open()` to `close()`.
    """

    def __init__(self, endpoint: str, network: NetworkConfig) -> None:
        self.endpoint = endpoint
        self._network = network
        self._server_id = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._session = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._workers: dict[int, RemoteWorker] = {}
        self._outgoing: asyncio.Queue[tuple[str, Wire, RemoteWorker | None]] = asyncio.Queue()
        self.settled = asyncio.Event()
        """The pool has welcomed this session, or there will be no welcome."""
        self.refusal: str | None = None
        self._host = ""
        self.was_welcomed = False
        self._connections = 0
        self._heard_at = self._said_at = 0.0
        self._stalls = Stalls(LOOK_EVERY_S + SLOWEST_TURN_S)
        self._socket: ServerSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, setup: bytes, *, kind: WorkerKind, loads: str, timeout_s: float, max_reply_bytes: int
    ) -> RemoteWorker:
        """A process that has loaded what the packed first message names. Only while the pool `is_there`.

        Raises PoolLostError where the pool goes meanwhile, UserError where it cannot be loaded.
        """
        number = next(self._numbers)
        worker = self._workers[number] = RemoteWorker(self, number, max_reply_bytes)
        try:
            self.post(ProcessStart(process=number, kind=kind), worker)
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.started.wait(), PLACE_WAIT_S)
            if not worker.started.is_set() or worker.has_ended:
                told = await worker.how_it_ended() if worker.has_ended else f"no answer in {PLACE_WAIT_S:g} s"
                raise UserError(f"no process was started: {told}")
            await worker.load(setup, timeout_s, kind, loads)
            return worker
        except UserError as error:
            await worker.stop()
            told = f"on the pool {self.endpoint} ({self._host}): {error}{_hint(error)}"
            raise (PoolLostError if worker.lost_with_pool else UserError)(told) from error.__cause__
        except BaseException:
            await worker.stop()
            raise

    @property
    def is_there(self) -> bool:
        """Whether the pool takes orders now."""
        return self.settled.is_set() and self.refusal is None

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def post(self, message: Wire, worker: RemoteWorker | None = None) -> None:
        """Put a message on its way. It goes nowhere where its session has ended."""
        self._outgoing.put_nowait((self._session, message, worker))

    def forget(self, number: int) -> None:
        self._workers.pop(number, None)

    async def close(self) -> None:
        """Leave the pool, which ends what is left there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._lose_all("this side has left")
        if self._socket is not None:
            if self._socket.is_connected:
                with suppress(SendTimeout, HandshakeRejected):
                    await self._socket.send(Goodbye(reason="done"), timeout_s=1.0)
            self._socket.close()
            self._context.term()
            self._socket = None

    def open(self) -> None:
        """Dial the pool. Raises UserError."""
        if self._socket is not None:
            return
        keys_dir = self._network.keys_dir
        self._context = zmq.asyncio.Context()
        try:
            self._socket = ServerSocket(
                self.endpoint,
                FromPool,
                keys=read_server_keys(Path(keys_dir), POOL_PUBLIC) if keys_dir else None,
                peer="pool",
                insecure=self._network.insecure,
                context=self._context,
            )
        except (BindError, KeyFileError) as error:
            self._context.term()
            raise UserError(str(error)) from error
        self._heard_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._serve(self._socket)), asyncio.create_task(self._send(self._socket))]

    async def _serve(self, socket: ServerSocket) -> None:
        """Receive, say hello until welcomed, and notice when the pool has gone."""
        while True:
            message = await socket.recv(min(LOOK_EVERY_S, self._network.heartbeat_s))
            now = time.monotonic()
            self._heard_at += self._stalls.look(now)
            if message is not None:
                self._heard_at = now
                self._take(message)
            elif self.settled.is_set() and now - self._heard_at > self._network.timeout_s and not self.refusal:
                self._lose_all(f"the pool has been silent for {now - self._heard_at:.0f} s")
            is_served = self.settled.is_set() and not self.refusal
            if is_served and (not socket.is_connected or socket.connections != self._connections):
                self._lose_all("the connection to the pool was lost")
            if now - self._said_at < (self._network.heartbeat_s if self.settled.is_set() else HELLO_EVERY_S):
                continue
            self._said_at = now
            if self.settled.is_set():
                self.post(PoolHeartbeat())
            else:
                await self._say_hello(socket)

    async def _say_hello(self, socket: ServerSocket) -> None:
        network = self._network
        hello = PoolHello(
            server_id=self._server_id,
            session=self._session,
            heartbeat_s=network.heartbeat_s,
            timeout_s=network.timeout_s,
        )
        try:
            socket.check_handshakes()
            await socket.send(hello, timeout_s=HELLO_EVERY_S)
            self._connections = socket.connections
        except SendTimeout:
            pass  # it may come
        except HandshakeRejected as problem:
            self._refuse(str(problem))

    def _take(self, message: Message | BadMessage) -> None:
        if isinstance(message, BadMessage):
            logger.warning("a message from the pool %s could not be used: %s", self.endpoint, message.error)
        elif isinstance(message, PoolWelcome):
            if message.session == self._session and not self.settled.is_set():
                self._host, self.was_welcomed = message.host, True
                logger.info("the pool %s (%s) starts processes for this server", self.endpoint, message.host)
                self.settled.set()
        elif isinstance(message, Refusal):
            self._refuse(f"the pool {self.endpoint} refuses this server: {message.reason}. {message.fix}")
        elif isinstance(message, ProcessStarted | ProcessData | ProcessEnded):
            worker = self._workers.get(message.process)
            if worker is None:
                return  # it has been given up
            if isinstance(message, ProcessStarted):
                worker.started.set()
            elif isinstance(message, ProcessData):
                worker.take(message.data)
            else:
                worker.lose(message.reason, gone=True)
        elif isinstance(message, Goodbye):
            self._lose_all(f"the pool has left: {message.reason}")
        elif isinstance(message, Error):
            if message.code is not ErrorCode.NOT_WELCOME:
                logger.warning("the pool %s answers %s: %s", self.endpoint, message.code, message.reason)
            elif self.settled.is_set():
                self._lose_all("the pool was started again")

    async def _send(self, socket: ServerSocket) -> None:
        while True:
            session, message, worker = await self._outgoing.get()
            if session != self._session:
                continue
            try:
                await socket.send(message, self._network.timeout_s)
            except (SendTimeout, HandshakeRejected) as problem:
                self._lose_all(str(problem))
            except ProtocolError as error:
                if worker is not None:
                    worker.lose(f"a message to it cannot be sent: {error.reason}")

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._lose_all(reason)
        self.settled.set()

    def _lose_all(self, how: str) -> None:
        """End this session: its processes are lost, and the next hello begins another."""
        if self.settled.is_set() and self._workers:
            logger.warning("%d processes at the pool %s are lost: %s", len(self._workers), self.endpoint, how)
        self.settled.clear()
        self._session = uuid.uuid4().hex
        self._said_at = 0.0
        self._heard_at = time.monotonic()
        for worker in self._workers.values():
            worker.lost_with_pool = worker.lost_with_pool or not worker.has_ended
            worker.lose(how, gone=True)
        if self.refusal is not None:
            self.settled.set()


class Pools:
    """Worker processes at one pool or several, for the event loop that calls `start`.

    Example:
        pools = Pools(("tcp://10.0.0.9:7603",), config.network)
        worker = await pools.start(setup, kind="reward", loads="the reward functions", timeout_s=120, ...)
        reply = await worker.ask(frame, timeout_s=15)
        await worker.stop()
        await pools.close()
    """

    def __init__(self, endpoints: Sequence[str], network: NetworkConfig) -> None:
        self._connections = [PoolConnection(endpoint, network) for endpoint in endpoints]
        self._network = network
        self._are_met = False
        """All of them had the time to answer: the first processes are spread."""

    async def start(
        self, setup: bytes, *, kind: WorkerKind, loads: str, timeout_s: float, max_reply_bytes: int
    ) -> RemoteWorker:
        """A process that has loaded what the packed first message names, at the pool with the fewest of this server's;
        waits while there is no pool.

        Raises UserError where it cannot be loaded there, or a pool refuses this machine, WaitTimeoutError where no pool
        comes.
        """
        for connection in self._connections:
            connection.open()
        for failures in itertools.count(1):
            await self._wait_for_one()
            connection = min((pool for pool in self._connections if pool.is_there), key=lambda pool: pool.num_workers)
            try:
                return await connection.start(
                    setup, kind=kind, loads=loads, timeout_s=timeout_s, max_reply_bytes=max_reply_bytes
                )
            except PoolLostError as lost:
                if failures >= START_TRIES:
                    raise
                logger.warning("a start is tried again: %s", lost)
                await asyncio.sleep(BACK_OFF_S * 2 ** (failures - 1))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Leave the pools, which end what is left there."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _wait_for_one(self) -> None:
        """Return when a pool is there. Raises UserError where one refuses, WaitTimeoutError."""
        if any(connection.was_welcomed for connection in self._connections):
            limit_s, setting = self._network.reconnect_timeout_s, "network.reconnect_timeout_s"
        else:
            limit_s, setting = self._network.start_timeout_s or FIRST_WAIT_S, "network.start_timeout_s"
        where = ", ".join(connection.endpoint for connection in self._connections)
        if not any(connection.settled.is_set() for connection in self._connections):
            logger.info("waiting for a pool at %s, for %g s at most", where, limit_s)
        settling = [asyncio.create_task(connection.settled.wait()) for connection in self._connections]
        try:
            settled, others = await asyncio.wait(settling, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if settled and others and not self._are_met:
                await asyncio.wait(others, timeout=MEETING_S)
        finally:
            for task in settling:
                task.cancel()
        self._are_met = True
        for connection in self._connections:
            if connection.refusal is not None:
                raise UserError(connection.refusal)
        if not settled:
            raise WaitTimeoutError(
                f"no pool answered at {where} within {limit_s:g} s ({setting}). Is `asyncrl pool` running there, and "
                "can its port be reached from here?"
            )
        if not any(connection.is_there for connection in self._connections):  # it has gone in this moment
            await self._wait_for_one()


def _hint(error: UserError) -> str:
    if "cannot be imported" not in str(error):
        return ""
    return ". The file itself travels; what it imports must be on that machine: installed, or in a folder of that path"
