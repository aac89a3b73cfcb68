"""Hostile rollout servers: `python -m tests.rigs.fuzz.hostile CONTROL WEIGHTS MESSAGES SEED [KEYS]`.

Most connections send fewer bad messages than a peer's budget and go, so that each is decoded; some flood and are
muted. Each polite one ends with a probe whose answer proves that the learner is alive.
Prints counts as one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import msgpack
import zmq

from protocol.codec import Limits, decode
from protocol.curve import read_server_keys
from protocol.curve_auth import become_curve_client
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    ChunkRequest,
    ControlFromLearner,
    Error,
    Goodbye,
    LeaseReturn,
    Message,
    TicketFailed,
    Tickets,
    WeightManifest,
    WeightsFromLearner,
    WeightsLoaded,
    Wire,
)
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import Frames, frames_of, mutate, wrong_group

PER_CONNECTION = 12
"""Below the 16 bad messages that mute a peer."""
PROBE_S = 20.0
FLOOD = 2000
FLOODED = "more, from peers over their budget"
NEVER_ISSUED = 10**9


class Hostile:
    def __init__(self, control: str, weights: str, messages: int, seed: int, keys: str | None):
        self._endpoints = {"control": control, "weights": weights}
        self._left = messages
        self._rng = random.Random(seed)
        self._keys = read_server_keys(Path(keys)) if keys else None
        self._context = zmq.Context()
        self._number = 0
        self._versions: Counter[int] = Counter({0: 1})
        self._publication = "unknown"
        self._ids = [0]
        self.answers: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.probe_s: list[float] = []

    def run(self) -> None:
        while self._left > 0:
            draw = self._rng.random()
            if draw < 0.002:
                self._flood()
            elif draw < 0.20:
                self._polite("weights", welcomed=False)
            else:
                self._polite("control", welcomed=draw > 0.35)
        self._context.term()

    # --- kinds of connections -------------------------------------------------------------------

    def _polite(self, where: str, *, welcomed: bool) -> None:
        sock = self._dial(where)
        name = f"hostile-{self._number}"
        try:
            held: list[tuple[int, int]] = []
            if welcomed:
                self._send(sock, frames_of(content.hello(name)), "hello", counted=False)
                held = self._tickets(sock)
            for _ in range(min(PER_CONNECTION, self._left)):
                self._one(sock, where, name, held)
            if where == "weights":
                version, publication = max(self._versions), self._publication
                good = ChunkRequest(version=version, publication=publication, offset=0, nbytes=1 << 16)
                self._send(sock, frames_of(good), "good chunk request", counted=False)
            self._probe(sock, where)
            if welcomed and self._rng.random() < 0.8:
                self._send(sock, frames_of(Goodbye(reason="enough")), "goodbye", counted=False)
        finally:
            sock.close(linger=200)

    def _one(self, sock: zmq.Socket[bytes], where: str, name: str, held: list[tuple[int, int]]) -> None:
        rng = self._rng
        if where == "weights":
            self._send(sock, mutate(rng, frames_of(self._chunk_request())), "weights, mutated")
        elif held and rng.random() < 0.3:
            ticket_id, version = rng.choice(held)
            self._send(sock, frames_of(wrong_group(rng, ticket_id, version, name)), "wrong group of its own ticket")
        elif rng.random() < 0.1:
            newest = max(0, max(self._ids) + rng.randint(-20, 20))
            ticket_id = rng.choice((newest, rng.choice(self._ids), NEVER_ISSUED, 2**63 - 1))
            group = wrong_group(rng, ticket_id, max(self._versions), name)
            self._send(sock, frames_of(group), "wrong group of another's ticket")
        elif rng.random() < 0.1:
            ticket_id = max(0, max(self._ids) + rng.randint(-20, 5))
            failed = TicketFailed(ticket_id=ticket_id, error_kind=str(rng.random()), error_message="x\ny")
            self._send(sock, frames_of(failed), "failure of any ticket")
        else:
            self._send(sock, mutate(rng, frames_of(self._template(name))), "control, mutated")

    def _flood(self) -> None:
        """Send on long after being muted."""
        where = self._rng.choice(("control", "weights"))
        sock = self._dial(where)
        for _ in range(FLOOD):
            self._send(sock, mutate(self._rng, frames_of(self._template("flood"))), FLOODED, counted=False)
            self.sent[FLOODED] += 1
        sock.close(linger=1000)

    # --- pieces -----------------------------------------------------------------------------------

    def _dial(self, where: str) -> zmq.Socket[bytes]:
        self._number += 1
        sock = self._context.socket(zmq.DEALER)
        if self._keys is not None:
            become_curve_client(sock, self._keys)
        sock.setsockopt(zmq.SNDTIMEO, round(PROBE_S * 1000))
        sock.setsockopt(zmq.LINGER, 200)
        sock.connect(self._endpoints[where])
        return sock

    def _send(self, sock: zmq.Socket[bytes], frames: Frames, what: str, *, counted: bool = True) -> None:
        if not frames:
            return
        sock.send_multipart(frames)
        if counted:
            self.sent[what] += 1
            self._left -= 1

    def _template(self, name: str) -> Wire:
        """One of every message, of this direction and of the other; groups more often."""
        rng = self._rng
        group = content.group(NEVER_ISSUED + rng.randrange(1000), 0, name)
        return rng.choice(
            (
                *(group, group, group, content.hello(name), content.heartbeat(), self._chunk_request()),
                TicketFailed(ticket_id=NEVER_ISSUED, error_kind="kind", error_message="message"),
                WeightsLoaded(version=0, channel="zmq", transfer_s=0.1, load_s=0.1),
                LeaseReturn(fence=1, wake_s=0.1, sleep_s=0.1, sleep_bytes=1),
                Error(code=ErrorCode.MALFORMED, reason="reason", ticket_id=NEVER_ISSUED),
                Tickets(tickets=(content.ticket(NEVER_ISSUED, 0),)),
            )
        )

    def _chunk_request(self) -> ChunkRequest:
        rng = self._rng
        version = max(0, max(self._versions) + rng.choice((-3, 0, 0, 0, 1)))
        return ChunkRequest(
            version=version,
            publication=rng.choice((*3 * (self._publication,), "another")),
            offset=rng.choice((0, 64, 2**40)),
            nbytes=rng.choice((1, 1000, 1 << 20, 2**62)),
        )

    def _tickets(self, sock: zmq.Socket[bytes]) -> list[tuple[int, int]]:
        """Wait a little for tickets; there may be none."""
        deadline = time.monotonic() + 0.02
        held: list[tuple[int, int]] = []
        while not held and sock.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            message = self._receive(sock, ControlFromLearner)
            if isinstance(message, Tickets):
                held = [(ticket.ticket_id, ticket.min_version) for ticket in message.tickets]
                self._ids = (self._ids + [ticket_id for ticket_id, _ in held])[-200:]
                self._versions.update(version for _, version in held)
        return held

    def _receive(self, sock: zmq.Socket[bytes], expected) -> Message | None:
        try:
            message = decode(sock.recv_multipart(copy=False), expected, Limits())
        except ProtocolError:
            self.answers["answer that we cannot read"] += 1
            return None
        if isinstance(message, WeightManifest):
            self._publication = message.publication
            self._versions[message.version] += 1
        self.answers[str(message.code) if isinstance(message, Error) else message.type] += 1
        return message

    def _probe(self, sock: zmq.Socket[bytes], where: str) -> None:
        """Send a message type of this connection alone: its answer shows that all before it has been handled."""
        name = f"probe-{self._number}"
        started = time.monotonic()
        self._send(sock, [msgpack.packb({"type": name})], "probe", counted=False)
        expected = ControlFromLearner if where == "control" else WeightsFromLearner
        while True:
            left_s = started + PROBE_S - time.monotonic()
            if left_s <= 0 or not sock.poll(round(1000 * left_s)):
                raise TimeoutError(f"the learner did not answer {name} on {where} within {PROBE_S:g} s: it hangs")
            message = self._receive(sock, expected)
            if isinstance(message, Error) and (name in message.reason or message.code is ErrorCode.MUTED):
                self.probe_s.append(time.monotonic() - started)
                return


def main(control: str, weights: str, messages: str, seed: str, keys: str | None = None) -> None:
    hostile = Hostile(control, weights, int(messages), int(seed), keys)
    hostile.run()
    slowest = max(hostile.probe_s, default=0.0)
    report = {"sent": hostile.sent, "answers": hostile.answers, "slowest_probe_s": slowest}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
