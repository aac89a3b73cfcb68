"""A rollout server's DEALER, for asyncio."""

from __future__ import annotations

import asyncio
import time

import zmq
import zmq.asyncio

from protocol.codec import Expected, Limits, encode
from protocol.curve import ServerKeys
from protocol.curve_auth import HandshakeWatch
from protocol.endpoints import check_dial, split_endpoint
from protocol.held import Allowance, ReceiveMemoryGuard
from protocol.messages import Message, Wire
from protocol.monitor import SocketMonitor
from protocol.reception import BadMessage, MessageReader, WireCounters, count_sent, read_frames
from protocol.socket_options import LINGER_S, SERVER_QUEUES, Queues, become_curve_client, configure

WAIT_S = 0.1
"""A socket that says nothing is looked at so often, which shows that whatever ZeroMQ holds is unfinished."""


class SendTimeout(TimeoutError):
    """The learner took no message in time."""


class ServerSocket:
    """A connected DEALER for an asyncio program. Any number of tasks may send, one may receive.

    ZeroMQ reconnects by itself, and then the learner does not know us any more: it answers NOT_WELCOME
    until we say hello again. Nothing is queued for a learner that is not there.

    Without `keys` it dials loopback only, unless `insecure`. Raises `endpoints.InsecureBindError`.
    """

    def __init__(
        self,
        endpoint: str,
        expected: Expected,
        limits: Limits | None = None,
        *,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        queues: Queues = SERVER_QUEUES,
        linger_s: float = LINGER_S,
        context: zmq.asyncio.Context | None = None,
    ):
        if keys is None and not insecure:
            check_dial(endpoint)
        self.endpoint = endpoint
        self.limits = limits or Limits()
        self.counters = WireCounters()
        self._expected = expected
        self._socket = (context or zmq.asyncio.Context.instance()).socket(zmq.DEALER)
        configure(self._socket, self.limits, queues, linger_s)
        if keys is not None:
            become_curve_client(self._socket, keys)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor = SocketMonitor(self._socket)
        self._handshakes = HandshakeWatch(self._monitor, endpoint, keys)
        curve = keys is not None
        self._held = ReceiveMemoryGuard(
            self._monitor,
            Allowance.of(self.limits, queues, curve=curve),
            curve=curve,
            port=split_endpoint(endpoint)[1],
            bound=False,
        )
        # A plain socket, also where `_socket` belongs to asyncio: these reads never wait.
        plain = zmq.Socket.shadow(self._socket.underlying)
        self._reader = MessageReader(plain, self.limits.max_frames, self._held, routed=False)
        self._socket.connect(endpoint)

    async def recv(self, timeout_s: float) -> Message | BadMessage | None:
        """The next message, or None after `timeout_s`. Safe to cancel: no message is lost."""
        await asyncio.sleep(0)  # other tasks go on while messages come without a pause
        deadline = time.monotonic() + timeout_s
        frames = self._reader.take()  # before any wait, which costs more than a small message
        # Waiting and taking are separate: a cancelled wait could otherwise drop what it had just taken.
        while frames is None and (left_s := deadline - time.monotonic()) > 0:
            await self._socket.poll(round(1000 * min(left_s, WAIT_S)))
            frames = self._reader.take()
        if frames is None:
            return None
        return read_frames(b"", frames, self._expected, self.limits, self.counters)

    async def send(self, message: Wire, timeout_s: float) -> None:
        """Raises SendTimeout if there is no connection, or the learner's queue stays full.

        Raises HandshakeRejected where there is no connection because the keys of the two sides do not fit, and
        ProtocolError for a message beyond the limits, or with odd values.
        """
        frames = encode(message, self.limits)
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(frames)
        except TimeoutError as problem:
            self.counters.undelivered += 1
            self.check_handshakes()
            raise SendTimeout(
                f"waited {timeout_s:g} s to send `{getattr(message, 'type', '?')}` to the learner at "
                f"{self.endpoint}: no connection, or its queue is full"
            ) from problem
        count_sent(self.counters, frames)

    def check_handshakes(self) -> None:
        """Raises HandshakeRejected where there is no connection because none can be made."""
        self._handshakes.check()

    def take_ended(self) -> int:
        """Connections ended since the last call, because ZeroMQ held too much for them (see `held`)."""
        return self._held.take_ended()

    def close(self) -> None:
        self._held.close()
        self._monitor.close()
        self._socket.close()
