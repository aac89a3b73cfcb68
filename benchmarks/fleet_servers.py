"""The rollout servers of `benchmarks.fleet`: whole ones but for model, tokenizer and rewards, many in one process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import zmq
import zmq.asyncio

from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import RolloutConfig
from asyncrl.models.published import fingerprint_of
from asyncrl_plugins.relays import relay
from benchmarks.staleness.sockets import ModelFreeServer
from benchmarks.staleness.workload import ModelFreeEngine, Workload
from learner.network import thread
from protocol import sockets
from protocol.messages import Chunk, Wire
from protocol.sockets import Delivery, Encoded, LearnerSocket
from protocol.weights import Tensor

TENSORS = 32
"""Tensors of a version, of equal size: as many steps as it can be sent on in."""
TICK_S = 0.02
MOST_SOCKETS = 65_536
"""Most sockets of all servers of a process together: libzmq's own limit of a context, 1,023, is for one."""
POLL_S = 1.0
"""Longest wait of a socket, in the place of a tenth of it: hundreds of servers in one process would only look."""


@dataclass(frozen=True)
class Cell:
    """Settings of one row of the table."""

    servers: int
    mib: int
    tokens: int
    fan_out: int
    link_mib_s: float = 0.0
    """Bytes that each sender may send in a second, learner and server alike; 0: what this machine can."""

    @property
    def workload(self) -> Workload:
        return Workload(
            servers=self.servers,
            bound=1,
            prompts_per_step=min(max(32, self.servers), 256),
            group_size=2,
            sequences=8 * self.servers,
            median_length=float(self.tokens),
            length_sigma=0.0,
            longest=self.tokens,
            seconds_per_token=0.0,
        )

    def config(self, control_port: int, weights_port: int) -> RunConfig:
        config = self.workload.config(
            control_port=control_port,
            weights_port=weights_port,
            heartbeat_s=5.0,
            timeout_s=120.0,
            start_timeout_s=1800.0,
        )
        relay = {"weights_channel": "relay", "relay": {"fan_out": self.fan_out or self.servers}}
        return config.model_copy(update={"rollout": RolloutConfig(**{**config.rollout.model_dump(), **relay})})

    @property
    def model(self) -> str:
        """The model's fingerprint."""
        return fingerprint_of((f"w{n}", "torch.uint8", (self.tensor_bytes,)) for n in range(TENSORS))

    @property
    def tensor_bytes(self) -> int:
        return (self.mib << 20) // TENSORS

    def weights(self, version: int) -> list[Tensor]:
        random = np.random.default_rng(version)
        return [
            Tensor(f"w{n}", "uint8", (self.tensor_bytes,), [memoryview(random.bytes(self.tensor_bytes))])
            for n in range(TENSORS)
        ]


def narrow(mib_s: float) -> None:
    """Let each weights socket of this process send chunks at this rate. They wait in it, as in a network card."""
    send, turn = LearnerSocket.send, LearnerSocket.turn
    queues: dict[LearnerSocket, tuple[deque[tuple[bytes, Chunk]], list[float]]] = {}

    def flush(self: LearnerSocket) -> None:
        waiting, free_at = queues.setdefault(self, (deque(), [0.0]))
        now = time.monotonic()
        free_at[0] = max(free_at[0], now - 0.15)  # what the last look was too late for
        while waiting and free_at[0] <= now:
            identity, chunk = waiting.popleft()
            send(self, identity, chunk)
            free_at[0] += chunk.data.nbytes / (mib_s * (1 << 20))

    def narrow_send(self: LearnerSocket, identity: bytes, message: Wire | Encoded) -> Delivery:
        if not isinstance(message, Chunk):
            return send(self, identity, message)
        flush(self)
        queues[self][0].append((identity, message))
        flush(self)
        return Delivery.SENT

    def narrow_turn(self: LearnerSocket):  # type: ignore[no-untyped-def]
        flush(self)
        yield from turn(self)

    LearnerSocket.send, LearnerSocket.turn = narrow_send, narrow_turn  # type: ignore[method-assign]
    relay.LOOK_EVERY_S = thread.POLL_S = TICK_S


class FleetServer(ModelFreeServer):
    fingerprint = ""

    async def _fingerprint(self) -> str:
        engine = self.engine
        assert isinstance(engine, ModelFreeEngine)
        engine._fingerprint = self.fingerprint
        return self.fingerprint


def serve(cell: Cell, config: RunConfig, number: int, pipe: Connection) -> None:
    """Run so many servers until the learner says goodbye. Tells the pipe what they have sent each other, in bytes."""
    logging.disable(logging.WARNING)
    sockets.POLL_S = POLL_S
    zmq.asyncio.Context.instance().set(zmq.MAX_SOCKETS, MOST_SOCKETS)
    FleetServer.fingerprint = cell.model
    if cell.link_mib_s:
        narrow(cell.link_mib_s)
    servers = [FleetServer(config) for _ in range(number)]

    async def run(server: FleetServer) -> BaseException | None:
        try:
            await server.run()
        except Exception as problem:
            print(f"a server ended: {problem!r}", flush=True)  # now: the learner waits for it
            return problem
        return None

    async def all_of_them() -> list[BaseException | None]:
        return await asyncio.gather(*(run(server) for server in servers))

    ended = asyncio.run(all_of_them())
    problems = [repr(problem) for problem in ended if problem is not None]
    receivers = [server.receiver._puller for server in servers if hasattr(server, "receiver")]
    received = {who: sum(each.received_bytes[who] for each in receivers) for who in ("learner", "server")}
    failures = sum(sum(each.failures.values()) for each in receivers)
    pipe.send((problems, received, failures))
