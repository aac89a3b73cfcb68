"""The two learners of the benchmark of groups: the real one, and plain pyzmq that moves the same bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import zmq
from group_traffic import KINDS, VOCABULARY, image, prepared

from asyncrl.config.run_sections import Durability
from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import Journal, TicketSlot
from asyncrl.launch.ports import free_port
from learner.network.servers import ModelFacts
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from protocol.codec import encode
from protocol.messages import Ack, Tickets, WeightManifest
from protocol.sockets import TURN_MESSAGES
from protocol.weights import Publication

PER_STEP, BOUND, CHECKPOINT_EVERY = 32, 3, 4
"""Groups and steps. After each checkpoint the journal forgets the groups of its steps; no weights are saved."""
ENDLESS = 10**8


class PlainLearner:
    """A ROUTER that sends the frames of tickets and takes those of groups, as many at a time as have arrived.

    `copy` is that of pyzmq's calls.
    """

    def __init__(self, in_flight: int, *, copy: bool):
        self._copy = copy
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:0")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._in_flight, self._next = in_flight, 0
        one, two = (len(encode(tickets_message(range(n)))[0]) for n in (1, 2))
        self._header_bytes = (2 * one - two, two - one)
        self._ack_bytes = len(encode(Ack(ticket_ids=(10_000,)))[0])

    def serve(self, done: Connection) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(done.fileno(), zmq.POLLIN)
        while done.fileno() not in (ready := dict(poller.poll())):
            if self._socket in ready:
                self._turn()

    def _turn(self) -> None:
        arrived = 0
        peer = b""
        while arrived < TURN_MESSAGES:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
            except zmq.Again:
                break
            peer = bytes(identity)
            arrived += len(frames) > 2
        if arrived:
            self._socket.send_multipart([peer, struct.pack("<3Q", arrived, 0, 0).ljust(self._ack_bytes)])
        self._send_tickets(peer, arrived or self._in_flight)

    def _send_tickets(self, peer: bytes, count: int) -> None:
        fixed, each = self._header_bytes
        header = struct.pack("<3Q", 0, self._next, count).ljust(fixed + count * each)
        images = [image((self._next + i) % KINDS)[1] for i in range(count)]
        self._next += count
        self._socket.send_multipart([peer, header, *images], copy=self._copy)

    def close(self) -> None:
        self._socket.close()


def tickets_message(ids: Iterable[int]) -> Tickets:
    items = [prepared(TicketSlot(i, i, 0, BOUND)) for i in ids]
    blobs = {digest: memoryview(data) for item in items for digest, data in item.blobs.items()}
    return Tickets(tickets=tuple(item.ticket for item in items), blobs=blobs)


class Learner:
    """The real network thread, ledger and journal; `serve` is the main thread, which takes batches at once."""

    def __init__(self, folder: Path, durability: Durability):
        folder.mkdir()
        ports = {"control_port": free_port(), "weights_port": free_port(), "timeout_s": 60.0}
        minimal = {"model": {"path": "none"}, "data": {"train_files": ["none"]}}
        reward = {"functions": [{"function": "exact_match"}]}
        config = RunConfig.model_validate({"run_dir": str(folder), **minimal, "reward": reward, "network": ports})
        self.endpoint = config.network.control_endpoint
        self.journal = Journal(folder / "journal.sqlite", durability)
        self.ledger = TicketLedger(self.journal, prompts_per_step=PER_STEP, bound=BOUND, total_groups=ENDLESS)
        self._publication = Publication("benchmark", folder)
        self.network = NetworkThread(
            config.network_settings,
            "benchmark",
            ledger=self.ledger,
            write_ticket=prepared,
            publication=self._publication,
            facts=ModelFacts("m", "p", VOCABULARY),
            version=0,
        )
        self.network.start()
        self.network.call_soon(self.network.tickets.admit, 0)

    def serve(self, done: Connection) -> None:
        while not done.poll(0):
            with self.ledger.changed:
                self.network.check()
                if not self.ledger.ready():
                    self.ledger.changed.wait(0.05)
                    continue
            self.ledger.take()
            version = self.ledger.version + 1
            self.ledger.advance(version)
            if version % CHECKPOINT_EVERY == 0:
                self.ledger.forget_payloads(version)
            manifest = WeightManifest(version=version, publication="p", tensors=(), total_bytes=0)
            self.network.call_soon(self.network.servers.announce, manifest)
            self.network.call_soon(self.network.tickets.admit, version)

    def close(self) -> None:
        self.network.stop(None)
        assert self.ledger.counts().residual == 0
        assert not self.network.servers.errors, self.network.servers.errors
        self._publication.close()
        self.journal.close()
