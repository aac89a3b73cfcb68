"""`asyncrl pool`: starts worker processes for rollout servers on other machines, and carries bytes between them.

It starts the workers of rewards and environments (KINDS) and nothing else, reads nothing of what it carries, and keeps
nothing. A peer's processes end when the peer says goodbye, is silent for too long, or connects again.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from asyncrl.rewards.worker_process import WorkerProcess
from asyncrl.telemetry.metric_set import MetricSet
from protocol.curve import LearnerKeys
from protocol.curve_auth import CurveAuthenticator
from protocol.endpoints import BindError
from protocol.errors import ErrorCode
from protocol.handshake import refuse_other_protocol
from protocol.messages import (
    Error,
    Goodbye,
    PoolHeartbeat,
    PoolHello,
    PoolWelcome,
    ProcessData,
    ProcessEnded,
    ProcessStart,
    ProcessStarted,
    ProcessStop,
    ToPool,
    Wire,
    WorkerKind,
)
from protocol.peers import Muted, PeerLimits
from protocol.sockets import TURN_MESSAGES, Delivery, LearnerSocket, Queues, Received
from protocol.stalls import SLOWEST_TURN_S, Stalls

logger = logging.getLogger(__name__)

KINDS: dict[WorkerKind, str] = {"reward": "asyncrl.rewards.worker", "environment": "asyncrl.environments.worker"}
QUEUES = Queues(send=256, receive=64)
PEER_LIMITS = PeerLimits(messages=100_000)
"""A score costs two messages, and a busy server may ask for thousands of them in a second."""
LOOK_EVERY_S = 0.5
PLACE_WAIT_S = 60.0
"""Longest wait for a free place: those of a peer that has died are free again when its silence is noticed."""
MOST_UNREAD_BYTES = 512 << 20
"""Two of the largest messages: a peer waits for an answer before it says more."""
MOST_ASKED = 1024
"""Processes of one peer, waiting ones included."""


@dataclass
class _Carried:
    """A process of a peer; None until it has a place and runs."""

    kind: WorkerKind
    task: asyncio.Task[None] | None = None
    process: WorkerProcess | None = None


@dataclass
class _Peer:
    identity: bytes
    hello: PoolHello
    heard_at: float
    told_at: float = 0.0
    processes: dict[int, _Carried] = field(default_factory=dict)


class PoolHost:
    """Made inside an event loop; `run()` serves until it is cancelled. Raises BindError where it cannot listen."""

    def __init__(
        self, endpoint: str, keys: LearnerKeys | None, *, insecure: bool, processes: int, metrics: MetricSet
    ) -> None:
        """`processes`: most of them at a time, for all peers together."""
        self._context = zmq.Context()
        self._authenticator = CurveAuthenticator(self._context, keys) if keys else None
        try:
            self._socket = LearnerSocket(
                endpoint,
                ToPool,
                setting="--port",
                insecure=insecure,
                authenticator=self._authenticator,
                queues=QUEUES,
                peer_limits=PEER_LIMITS,
                context=self._context,
            )
        except BindError:
            self._close_context()
            raise
        self.endpoint = self._socket.endpoint
        self._pollable: zmq.asyncio.Socket = zmq.asyncio.Socket.shadow(self._socket.socket.underlying)
        self._most = processes
        self._places = asyncio.Semaphore(processes)
        self._peers: dict[bytes, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stalls = Stalls(LOOK_EVERY_S + SLOWEST_TURN_S)
        self._dropped_bytes = 0
        self.metrics = metrics
        self.metrics["places"].set(processes)
        self.metrics.before_scrape(self._read)

    async def run(self) -> None:
        """Serve until cancelled; then no process is left."""
        try:
            while True:
                await self._pollable.poll(round(1000 * LOOK_EVERY_S))
                self._work()
        finally:
            for peer in list(self._peers.values()):
                self._socket.send(peer.identity, Goodbye(reason="the pool was asked to end"))
                self._drop(peer, "this pool ends")
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._authenticator is not None:
                self._authenticator.close()
                self._authenticator = None
            self._socket.close()
            self._close_context()

    def _read(self) -> None:
        """Set what changes all the time; on the endpoint's thread."""
        peers = list(self._peers.values())
        carried = [each for peer in peers for each in list(peer.processes.values())]
        self.metrics["servers"].set(len(peers))
        for kind in KINDS:
            mine = [each.process is not None for each in carried if each.kind == kind]
            for state, count in (("running", sum(mine)), ("waiting", len(mine) - sum(mine))):
                self.metrics["processes"].labels(kind=kind, state=state).set(count)
        self.metrics["pulse_age_seconds"].set(max(0.0, time.monotonic() - self._stalls.looked_at))

    def _work(self) -> None:
        """Take what has arrived, and look who is silent."""
        if self._socket.socket.closed:
            return
        taken = 0
        for received in self._socket.turn():
            taken += 1
            if isinstance(received, Received):
                self._take(received)
            elif isinstance(received, Muted):
                self.metrics["refused_total"].inc()
                logger.warning("a peer is ignored: %s", received.reason)
                if received.identity in self._peers:
                    self._drop(self._peers[received.identity], "it sent too much")
            else:
                self.metrics["refused_total"].inc()
                logger.warning("a message could not be used: %s", received.error)
        if self._authenticator is not None:
            self._authenticator.take_rejections()  # which logs them
        now = time.monotonic()
        stalled_s = self._stalls.look(now)
        for peer in list(self._peers.values()):
            peer.heard_at += stalled_s
            if now - peer.heard_at > peer.hello.timeout_s:
                self._drop(peer, f"it has been silent for {now - peer.heard_at:.0f} s")
            elif now - peer.told_at >= peer.hello.heartbeat_s:
                peer.told_at = now
                if self._socket.send(peer.identity, PoolHeartbeat()) is Delivery.UNREACHABLE:
                    self._drop(peer, "its connection is closed")
        if taken >= TURN_MESSAGES:
            asyncio.get_running_loop().call_soon(self._work)

    def _take(self, received: Received) -> None:
        message, identity = received.message, received.identity
        if isinstance(message, PoolHello):
            self._welcome(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            if not isinstance(message, Goodbye | Error):
                reason = "this pool does not know the connection, and has no process of it"
                self._socket.send(identity, Error(code=ErrorCode.NOT_WELCOME, reason=reason))
            return
        peer.heard_at = time.monotonic()
        if isinstance(message, ProcessStart):
            self._start(peer, message)
        elif isinstance(message, ProcessData):
            carried = peer.processes.get(message.process)
            if carried is not None and carried.process is not None:  # else it has ended, and the peer is told so
                carried.process.write(bytes(message.data))
                self.metrics["carried_bytes_total"].labels(direction="to").inc(len(message.data))
                if carried.process.unread_bytes > MOST_UNREAD_BYTES and carried.task is not None:
                    logger.warning("%s: process %d reads nothing, and is killed", peer.hello.server_id, message.process)
                    carried.task.cancel()
        elif isinstance(message, ProcessStop):
            carried = peer.processes.get(message.process)
            if carried is not None and carried.task is not None:
                carried.task.cancel()
            elif carried is None:
                self._socket.send(identity, ProcessEnded(process=message.process, reason="it had ended"))
        elif isinstance(message, Goodbye):
            self._drop(peer, f"it says goodbye ({message.reason})")
        elif isinstance(message, Error):
            logger.warning("%s answers %s: %s", peer.hello.server_id, message.code, message.reason)

    def _welcome(self, identity: bytes, hello: PoolHello) -> None:
        refusal = refuse_other_protocol(hello.model_dump())
        if refusal is not None:
            self._socket.send(identity, refusal)
            self._socket.charge(identity)
            return
        known = self._peers.get(identity)
        if known is None or known.hello.session != hello.session:
            for peer in list(self._peers.values()):
                if peer is known or peer.hello.server_id == hello.server_id:
                    self._drop(peer, "it has connected again")
            self._peers[identity] = _Peer(identity, hello, time.monotonic())
            logger.info("%s is welcome", hello.server_id)
        self._socket.send(identity, PoolWelcome(session=hello.session, host=platform.node()))

    def _start(self, peer: _Peer, message: ProcessStart) -> None:
        if message.process in peer.processes:
            return
        if len(peer.processes) >= MOST_ASKED:
            reason = f"{MOST_ASKED} processes have been asked for by one peer"
            self._socket.send(peer.identity, ProcessEnded(process=message.process, reason=reason))
            return
        carried = peer.processes[message.process] = _Carried(message.kind)
        carried.task = asyncio.create_task(self._carry(peer, message.process, carried))
        self._tasks.add(carried.task)
        carried.task.add_done_callback(self._tasks.discard)

    async def _carry(self, peer: _Peer, number: int, carried: _Carried) -> None:
        """Run one process until it ends, or this task is cancelled."""
        reason, how, kind = "it was stopped", "stopped", carried.kind
        try:
            try:
                async with asyncio.timeout(PLACE_WAIT_S):
                    await self._places.acquire()
            except TimeoutError:
                how = "without a place"
                reason = f"all {self._most} processes of the pool have been in use for {PLACE_WAIT_S:g} s (--processes)"
                return
            try:
                reason, how = await self._run(peer, number, carried), "by itself"
            finally:
                try:
                    if carried.process is not None:
                        await carried.process.stop()
                finally:
                    self._places.release()
        except asyncio.CancelledError:
            pass  # a peer has asked for it, or has gone
        except OSError as error:
            reason, how = f"it could not be started: {error}", "not started"
        finally:
            self.metrics["ended_total"].labels(kind=kind, how=how).inc()
            peer.processes.pop(number, None)
            if self._peers.get(peer.identity) is peer:
                self._socket.send(peer.identity, ProcessEnded(process=number, reason=reason))
                self._look_again()
            logger.info("%s: %s process %d ended: %s", peer.hello.server_id, kind, number, reason)

    async def _run(self, peer: _Peer, number: int, carried: _Carried) -> str:
        """Carry until the process ends; returns how."""
        process = await WorkerProcess.begin(self._count_dropped, KINDS[carried.kind])
        carried.process = process
        self.metrics["started_total"].labels(kind=carried.kind).inc()
        logger.info("%s: %s process %d is pid %d", peer.hello.server_id, carried.kind, number, process.pid)
        await self._send(peer, ProcessStarted(process=number, pid=process.pid))
        while data := await process.read():
            self.metrics["carried_bytes_total"].labels(direction="from").inc(len(data))
            await self._send(peer, ProcessData(process=number, data=memoryview(data)))
        return await process.how_it_ended()

    async def _send(self, peer: _Peer, message: Wire) -> None:
        """Send, and wait while the peer's queue is full: its process then waits, too."""
        gives_up_at = time.monotonic() + peer.hello.timeout_s
        while (delivery := self._socket.send(peer.identity, message)) is Delivery.QUEUE_FULL:
            if time.monotonic() > gives_up_at:
                break
            await asyncio.sleep(0.02)
        if delivery is Delivery.SENT:
            self._look_again()
            return
        self._drop(peer, "its connection is closed" if delivery is Delivery.UNREACHABLE else "it reads nothing")
        await asyncio.sleep(0)  # where this task is cancelled

    def _look_again(self) -> None:
        """Sending may swallow the wake-up for a message that comes meanwhile."""
        asyncio.get_running_loop().call_soon(self._work)

    def _drop(self, peer: _Peer, why: str) -> None:
        """End a peer's processes, and know it no more."""
        self._peers.pop(peer.identity, None)
        logger.info("%s has gone: %s; %d processes end", peer.hello.server_id, why, len(peer.processes))
        for carried in peer.processes.values():
            if carried.task is not None:
                carried.task.cancel()

    def _count_dropped(self, nbytes: int) -> None:
        self._dropped_bytes += nbytes
        self.metrics["output_dropped_bytes_total"].inc(nbytes)
        logger.warning("processes printed more than is shown: %d bytes so far were dropped", self._dropped_bytes)

    def _close_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
