"""A server that does its work while others misbehave: `python -m tests.rigs.fuzz.good_server CONTROL WEIGHTS [KEYS]`.

It ends when the learner says goodbye, and prints its waiting times and errors as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from protocol.codec import Limits, decode, encode
from protocol.curve import read_server_keys
from protocol.curve_auth import become_curve_client
from protocol.messages import (
    Ack,
    Chunk,
    ChunkRequest,
    ControlFromLearner,
    Error,
    Goodbye,
    Message,
    Tickets,
    WeightManifest,
    WeightsFromLearner,
    Wire,
)
from tests.rigs.fuzz import content

NAME = "good-server"
BEAT_S = 0.2
GIVE_UP_S = 60.0
CHUNK_BYTES = 1000


class GoodServer:
    def __init__(self, control: str, weights: str, keys: str | None):
        self._context = zmq.Context()
        self._control, self._weights = (self._dial(endpoint, keys) for endpoint in (control, weights))
        self._sent_at: dict[int, float] = {}
        """Unacknowledged groups."""
        self._asked_at: float | None = None
        self._manifest: WeightManifest | None = None
        self._done = False
        self.ack_s: list[float] = []
        self.chunk_s: list[float] = []
        self.pulse_s: list[float] = []
        """Seconds between two messages of any kind from the learner."""
        self.errors: list[str] = []

    def _dial(self, endpoint: str, keys: str | None) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 500)
        if keys:
            become_curve_client(sock, read_server_keys(Path(keys)))
        sock.connect(endpoint)
        return sock

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._weights, zmq.POLLIN)
        self._send(content.hello(NAME))
        beat_at, heard_at = 0.0, time.monotonic()
        while not self._done:
            ready = dict(poller.poll(50))
            now = time.monotonic()
            if self._control in ready:
                self.pulse_s.append(now - heard_at)
                heard_at = now
                self._handle(decode(self._control.recv_multipart(copy=False), ControlFromLearner, Limits()), now)
            if self._weights in ready:
                self._take_chunk()
            if now - beat_at >= BEAT_S:
                beat_at = now
                self._send(content.heartbeat(len(self._sent_at)))
                self._ask_for_chunk(now)
            if now - heard_at > GIVE_UP_S:
                self.errors.append(f"no word from the learner for {GIVE_UP_S} s")
                return

    def _handle(self, message: Message, now: float) -> None:
        if isinstance(message, Tickets):
            for ticket in message.tickets:
                self._sent_at[ticket.ticket_id] = now
                self._send(content.group(ticket.ticket_id, ticket.min_version, NAME))
        elif isinstance(message, Ack):
            self.ack_s += [now - self._sent_at.pop(ticket_id) for ticket_id in message.ticket_ids]
        elif isinstance(message, WeightManifest):
            self._manifest = message
        elif isinstance(message, Error):
            self.errors.append(f"{message.code}: {message.reason}")
        elif isinstance(message, Goodbye):
            self._send(Goodbye(reason="done"))
            self._done = True

    def _ask_for_chunk(self, now: float) -> None:
        if self._manifest is not None and self._asked_at is None:
            self._asked_at = now
            version, publication = self._manifest.version, self._manifest.publication
            request = ChunkRequest(version=version, publication=publication, offset=0, nbytes=CHUNK_BYTES)
            self._weights.send_multipart(encode(request))

    def _take_chunk(self) -> None:
        answer = decode(self._weights.recv_multipart(copy=False), WeightsFromLearner, Limits())
        assert self._asked_at is not None
        if isinstance(answer, Chunk) and answer.data.nbytes != CHUNK_BYTES:
            self.errors.append(f"a chunk of {answer.data.nbytes} bytes")
        self.chunk_s.append(time.monotonic() - self._asked_at)
        self._asked_at = None

    def _send(self, message: Wire) -> None:
        self._control.send_multipart(encode(message))

    def close(self) -> None:
        self._control.close()
        self._weights.close()
        self._context.term()


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    return {
        "count": len(seconds),
        "p99_ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
        "max_ms": 1000 * ordered[-1],
    }


def main(control: str, weights: str, keys: str | None = None) -> None:
    server = GoodServer(control, weights, keys)
    server.run()
    server.close()
    waits = {"ack": summary(server.ack_s), "chunk": summary(server.chunk_s), "pulse": summary(server.pulse_s)}
    print(json.dumps({**waits, "errors": server.errors[:20]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
