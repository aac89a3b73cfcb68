"""Rollout servers without an engine, each in a process of its own: a good one at work, and hostile ones.

Most hostile connections send fewer bad messages than a peer's budget and go, so that each is decoded; some flood and
are muted. Each ends with a probe whose answer proves that the learner is alive.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import zmq

from protocol.codec import Limits, decode
from protocol.curve import become_curve_client, read_server_keys
from protocol.errors import ErrorCode
from protocol.messages import (
    Ack,
    Chunk,
    ChunkRequest,
    Error,
    Goodbye,
    Message,
    TicketFailed,
    Tickets,
    WeightManifest,
    Wire,
)
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import Frames, frames_of, mutate, pack, wrong_group

WAIT_S = 20.0
BEAT_S = 0.2
GIVE_UP_S = 60.0
CHUNK_BYTES = 1000
PER_CONNECTION = 12
"""Below the 16 bad messages that mute a peer."""
FLOOD = 2000
NEVER_ISSUED = 10**9
Kind = TypeVar("Kind", bound=Wire)


class Peer:
    """A plain DEALER, without any rules."""

    def __init__(self, endpoint: str, keys: str = ""):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RCVHWM, 32)
        self.socket.setsockopt(zmq.SNDTIMEO, round(1000 * WAIT_S))
        if keys:
            become_curve_client(self.socket, read_server_keys(Path(keys)))
        self.socket.connect(endpoint)

    def send(self, message: Wire | Frames) -> None:
        self.socket.send_multipart(message if isinstance(message, list) else frames_of(message))

    def receive(self, wait_s: float) -> Message | None:
        if not self.socket.poll(max(0, round(1000 * wait_s))):
            return None
        return decode(self.socket.recv_multipart(copy=False), Message, Limits())

    def hear(self, kind: type[Kind]) -> Kind:
        """The next message of that kind."""
        deadline = time.monotonic() + WAIT_S
        while (message := self.receive(deadline - time.monotonic())) is not None:
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__} within {WAIT_S} s")

    def hear_error(self, code: ErrorCode) -> Error:
        while (error := self.hear(Error)).code is not code:
            pass
        return error


def good_server(control: str, weights: str, keys: str = "") -> dict[str, Any]:
    """Answer every ticket and ask for weights until the learner says goodbye. Returns waiting times and errors."""
    learner, channel = Peer(control, keys), Peer(weights, keys)
    waited_s: dict[str, list[float]] = {"ack": [], "chunk": [], "pulse": []}
    """`pulse`: between two messages of any kind from the learner."""
    errors: list[str] = []
    sent_at: dict[int, float] = {}
    asked_at: float | None = None
    manifest: WeightManifest | None = None
    beat_at, heard_at, done = 0.0, time.monotonic(), False
    learner.send(content.hello("good-server"))
    while not done:
        message, now = learner.receive(BEAT_S / 4), time.monotonic()
        if message is not None:
            waited_s["pulse"].append(now - heard_at)
            heard_at = now
        if isinstance(message, Tickets):
            for ticket in message.tickets:
                sent_at[ticket.ticket_id] = now
                learner.send(content.group(ticket.ticket_id, ticket.min_version, "good-server"))
        elif isinstance(message, Ack):
            waited_s["ack"] += [now - sent_at.pop(ticket_id) for ticket_id in message.ticket_ids]
        elif isinstance(message, WeightManifest):
            manifest = message
        elif isinstance(message, Error):
            errors.append(f"{message.code}: {message.reason}")
        elif isinstance(message, Goodbye) or now - heard_at > GIVE_UP_S:
            learner.send(Goodbye(reason="done"))
            done = True
        if asked_at is not None and (answer := channel.receive(0)) is not None:
            if isinstance(answer, Chunk) and answer.data.nbytes != CHUNK_BYTES:
                errors.append(f"a chunk of {answer.data.nbytes} bytes")
            waited_s["chunk"].append(now - asked_at)
            asked_at = None
        if now - beat_at >= BEAT_S:
            beat_at = now
            learner.send(content.heartbeat(len(sent_at)))
            if manifest is not None and asked_at is None:
                asked_at, which = now, {"version": manifest.version, "publication": manifest.publication}
                channel.send(ChunkRequest(**which, offset=0, nbytes=CHUNK_BYTES))
    learner.socket.close()
    channel.socket.close()
    return {**{kind: _summary(sorted(seconds)) for kind, seconds in waited_s.items()}, "errors": errors[:20]}


def _summary(ordered: list[float]) -> dict[str, float]:
    ordered = ordered or [float("inf")]
    p99, slowest = ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]
    return {"count": len(ordered), "p99_ms": 1000 * p99, "max_ms": 1000 * slowest}


def hostile_servers(control: str, weights: str, messages: int, seed: int, keys: str = "") -> dict[str, Any]:
    """Send so many hostile messages over many connections. Returns counts of what was sent and answered."""
    hostile = _Hostile({"control": control, "weights": weights}, seed, keys)
    while hostile.sent.total() < messages:
        hostile.connect(most=messages - hostile.sent.total())
    return {"sent": hostile.sent, "flooded": hostile.flooded, "answers": hostile.answers, "probe_s": hostile.probe_s}


class _Hostile:
    def __init__(self, endpoints: dict[str, str], seed: int, keys: str):
        self._endpoints = endpoints
        self._rng = random.Random(seed)
        self._keys = keys
        self._number = 0
        self._newest_version = 0
        self._publication = "unknown"
        self._ids = [0]
        self.answers: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """Messages by kind."""
        self.flooded = 0
        """Messages of peers over their budget."""
        self.probe_s = 0.0
        """The slowest."""

    def connect(self, most: int) -> None:
        rng = self._rng
        self._number += 1
        name, where = f"hostile-{self._number}", rng.choice(("weights", *4 * ("control",)))
        peer = Peer(self._endpoints[where], self._keys)
        held: list[tuple[int, int]] = []
        if where == "control" and rng.random() < 0.8:
            peer.send(content.hello(name))
            held = self._take_tickets(peer)
        if rng.random() < 0.002:
            for _ in range(FLOOD):
                peer.send(mutate(rng, self._message(name)))
            self.flooded += FLOOD
        if where == "weights":  # first: a peer that is muted gets no answer any more
            for later in range(4):  # the learner has gone on since the tickets that name the version
                which = {"version": self._newest_version + later, "publication": self._publication}
                peer.send(ChunkRequest(**which, offset=0, nbytes=1 << 16))
        for _ in range(min(PER_CONNECTION, most)):
            kind, frames = self._damage(where, name, held)
            peer.send(frames)
            self.sent[kind] += 1
        self._probe(peer)
        if rng.random() < 0.8:
            peer.send(Goodbye(reason="enough"))
        peer.socket.close()

    def _damage(self, where: str, name: str, held: list[tuple[int, int]]) -> tuple[str, Frames]:
        rng = self._rng
        if where == "weights":
            return "weights, mutated", mutate(rng, self._chunk_request())
        draw = rng.random()
        if held and draw < 0.3:
            return "wrong group of its own ticket", frames_of(wrong_group(rng, *rng.choice(held), name))
        near = max(0, max(self._ids) + rng.randint(-20, 20))
        if draw < 0.4:
            any_id = rng.choice((near, rng.choice(self._ids), NEVER_ISSUED, 2**63 - 1))
            group = wrong_group(rng, any_id, self._newest_version, name)
            return "wrong group of another's ticket", frames_of(group)
        if draw < 0.5:
            failed = TicketFailed(ticket_id=near, error_kind=str(rng.random()), error_message="x\ny")
            return "failure of any ticket", frames_of(failed)
        return "control, mutated", mutate(rng, self._message(name))

    def _message(self, name: str) -> Wire:
        """One of every message, of this direction and of the other; groups more often."""
        draw = self._rng.random()
        if draw < 0.3:
            return content.group(NEVER_ISSUED + self._rng.randrange(1000), 0, name)
        if draw < 0.4:
            return content.hello(name)
        return self._chunk_request() if draw < 0.5 else self._rng.choice(content.EXAMPLES)

    def _chunk_request(self) -> ChunkRequest:
        rng = self._rng
        return ChunkRequest(
            version=max(0, self._newest_version + rng.choice((-3, 0, 0, 0, 1))),
            publication=rng.choice((*3 * (self._publication,), "another")),
            offset=rng.choice((0, 64, 2**40)),
            nbytes=rng.choice((1, 1000, 1 << 20, 2**62)),
        )

    def _take_tickets(self, peer: Peer) -> list[tuple[int, int]]:
        """Wait a little for tickets; there may be none."""
        deadline = time.monotonic() + 0.02
        while (message := self._receive(peer, deadline - time.monotonic())) is not None:
            if isinstance(message, Tickets):
                self._ids = [*self._ids, *(ticket.ticket_id for ticket in message.tickets)][-200:]
                self._newest_version = max(ticket.min_version for ticket in message.tickets)
                return [(ticket.ticket_id, ticket.min_version) for ticket in message.tickets]
        return []

    def _receive(self, peer: Peer, wait_s: float) -> Message | None:
        message = peer.receive(wait_s)
        if isinstance(message, WeightManifest):
            self._publication, self._newest_version = message.publication, message.version
        if message is not None:
            self.answers[str(message.code) if isinstance(message, Error) else message.type] += 1
        return message

    def _probe(self, peer: Peer) -> None:
        """Send a message type of this connection alone: its answer shows that all before it has been handled."""
        name = f"probe-{self._number}"
        started = time.monotonic()
        peer.send([pack({"type": name})])
        while (message := self._receive(peer, started + WAIT_S - time.monotonic())) is not None:
            if isinstance(message, Error) and (name in message.reason or message.code is ErrorCode.MUTED):
                self.probe_s = max(self.probe_s, time.monotonic() - started)
                return
        raise TimeoutError(f"the learner did not answer {name} within {WAIT_S:g} s: it hangs")
