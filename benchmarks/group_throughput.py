"""Groups through the learner's intake, against plain pyzmq that moves the same bytes.

    python benchmarks/group_throughput.py [--groups 200] [--repeats 7] [--in-flight 16] [--folder DIR]

A group is 8 completions of 2,048 tokens; its ticket carries one image of 500 kB. The learner is the real exchange with
a real ledger and a journal on disk: tickets with images go out, groups come in, are decoded, verified, journaled and
acknowledged, and a main thread takes batches and lets the journal forget them. The plain learner is a ROUTER that
sends the same frames and answers each turn's groups with one acknowledgement and one message of new tickets, as the
exchange does, and looks at nothing. Both talk over tcp on loopback to a DEALER in another process whose groups were
made and encoded beforehand; prompts are prepared beforehand, too. The arms take turns; ratios are of each repeat.

`--folder` should lie on the disk that runs would use: the journal is written there.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import sqlite3
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import zmq

import learner.intake
import learner.journal
import protocol.sockets
from asyncrl.config.schema import Durability, RunConfig
from asyncrl.models.prompt_facts import PromptFacts
from learner.connections import ModelFacts
from learner.exchange import Exchange
from learner.handout import Handout
from learner.journal import Journal, TicketSlot
from learner.tickets import PreparedTicket, ReceivedGroup, TicketLedger
from protocol.codec import Limits, decode, encode
from protocol.endpoints import free_port
from protocol.messages import (
    Ack,
    ChatMessage,
    FinishReason,
    Group,
    GroupTimings,
    Hello,
    ImagePart,
    Prompt,
    Sampling,
    ServerHeartbeat,
    TextPart,
    Ticket,
    TicketKind,
    Tickets,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
    WeightManifest,
)
from protocol.sockets import LearnerSocket
from protocol.weights import Publication

GROUP_SIZE, TOKENS, IMAGE_BYTES, PROMPT_TOKENS = 8, 2048, 500_000, 1024
VOCABULARY = 152_000
BANNED = tuple(range(151_643, 151_657))
"""As many as a Qwen2-VL has."""
KINDS = 64
"""Different images and groups; they are used in turn."""
PER_STEP, BOUND, CHECKPOINT_EVERY = 32, 3, 4
ENDLESS = 10**8
MARK = 2**62
"""A ticket id whose eight bytes the client overwrites in an encoded group."""
TARGET = 0.5


# --- what travels -----------------------------------------------------------------------------------


@lru_cache(maxsize=KINDS)
def image(kind: int) -> tuple[str, bytes]:
    """Content hash and bytes."""
    data = np.random.default_rng(kind).bytes(IMAGE_BYTES)
    return hashlib.sha256(data).hexdigest(), data


@lru_cache(maxsize=KINDS)
def facts(kind: int) -> PromptFacts:
    ids = np.random.default_rng(kind).integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
    return PromptFacts(ids, np.asarray([[1, 56, 72]], np.int32), (image(kind)[0],))


@lru_cache(maxsize=KINDS)
def ticket(kind: int) -> Ticket:
    """Made beforehand, but for its numbers."""
    question = TextPart(text="How many of the objects in the image are larger than the one on the left? " * 4)
    prompt = Prompt(
        row_id=f"rows.parquet:{kind}",
        messages=(ChatMessage(role="user", content=(ImagePart(), question)),),
        image_hashes=(image(kind)[0],),
        answer="17",
        columns={"difficulty": 3, "source": "benchmark"},
    )
    sampling = Sampling(max_new_tokens=TOKENS, stop_token_ids=(151_645,), banned_token_ids=BANNED)
    numbers = {"ticket_id": 0, "seed": 0, "min_version": 0}
    return Ticket(kind=TicketKind.TRAIN, prompt=prompt, group_size=GROUP_SIZE, sampling=sampling, **numbers)


def prepared(slot: TicketSlot) -> PreparedTicket:
    kind = slot.ticket_id % KINDS
    numbers = {"ticket_id": slot.ticket_id, "seed": slot.ticket_id, "min_version": slot.version}
    digest, data = image(kind)
    return PreparedTicket(ticket(kind).model_copy(update=numbers), {digest: data}, slot, facts(kind))


def group(kind: int, version: int = 0, ticket_id: int = MARK) -> Group:
    random = np.random.default_rng(kind)
    total = GROUP_SIZE * TOKENS
    record = TrajectoryRecord(
        status=TrajectoryStatus.FINISHED,
        finish_reason=FinishReason.STOP,
        rewards={"accuracy": 1.0, "format": 1.0},
        reward=1.0,
        turns=(Turn(start=0, end=TOKENS),),
    )
    return Group(
        ticket_id=ticket_id,
        server_id="benchmark",
        prompt_ids=facts(kind).token_ids,
        image_grids=facts(kind).image_grids,
        image_hashes=facts(kind).image_hashes,
        lengths=np.full(GROUP_SIZE, TOKENS, np.int32),
        token_ids=random.integers(0, BANNED[0], total).astype(np.int32),
        loss_mask=np.ones(total, np.uint8),
        logprobs=-random.random(total, np.float32),
        versions=np.full(total, version, np.int32),
        trajectories=(record,) * GROUP_SIZE,
        timings=GroupTimings(queued_s=0.1, generate_s=20.0, reward_s=0.2),
    )


# --- the client's process ---------------------------------------------------------------------------


class Client:
    """Answers each ticket with a group made beforehand; holds tickets back until it is told how many to answer."""

    def __init__(self, pipe: Connection, endpoint: str, plain: bool):
        self._pipe, self._plain = pipe, plain
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._groups = [encode(group(kind)) for kind in range(KINDS)]
        self._mark_at = self._groups[0][0].index(MARK.to_bytes(8, "big"))  # type: ignore[union-attr]
        self._held: list[tuple[int, int]] = []
        self._to_answer = self._to_acknowledge = 0
        self._versions: dict[int, np.ndarray] = {}

    def run(self, hello: list[bytes | memoryview]) -> None:
        self._socket.send_multipart(hello)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._pipe.fileno(), zmq.POLLIN)
        beat_at = started = cpu = 0.0
        while True:
            ready = dict(poller.poll(1000))
            if self._pipe.fileno() in ready:
                count = self._pipe.recv()
                if not count:
                    return
                self._to_answer = self._to_acknowledge = count
                started, cpu = time.perf_counter(), time.process_time()
            if self._socket in ready:
                self._listen()
            self._answer()
            if started and not self._to_acknowledge:
                self._pipe.send((time.perf_counter() - started, time.process_time() - cpu))
                started = 0.0
            if not self._plain and time.monotonic() - beat_at > 1:
                beat_at = time.monotonic()
                self._socket.send_multipart(_heartbeat(len(self._held)))

    def _listen(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            tickets, acknowledged = (_plain_header if self._plain else _header)(frames[0].buffer)
            self._held += tickets
            self._to_acknowledge -= acknowledged

    def _answer(self) -> None:
        while self._held and self._to_answer:
            ticket_id, version = self._held.pop(0)
            self._to_answer -= 1
            header, *columns, _ = self._groups[ticket_id % KINDS]
            patched = bytearray(header)
            patched[self._mark_at : self._mark_at + 8] = ticket_id.to_bytes(8, "big")
            versions = self._versions.setdefault(version, np.full(GROUP_SIZE * TOKENS, version, np.int32))
            self._socket.send_multipart([patched, *columns, versions], copy=False)


def _header(header: memoryview) -> tuple[list[tuple[int, int]], int]:
    """New tickets with their versions, and how many groups are acknowledged."""
    fields = msgpack.unpackb(header)
    tickets = [(ticket["ticket_id"], ticket["min_version"]) for ticket in fields.get("tickets", ())]
    if fields["type"] == "error":
        raise RuntimeError(fields["reason"])
    return tickets, len(fields["ticket_ids"]) if fields["type"] == "ack" else 0


def _plain_header(header: memoryview) -> tuple[list[tuple[int, int]], int]:
    acknowledged, first, count = struct.unpack_from("<3Q", header)
    return [(ticket_id, 0) for ticket_id in range(first, first + count)], acknowledged


def _heartbeat(held: int) -> list[bytes | memoryview]:
    beat = dict.fromkeys(("groups_queued", "groups_unacknowledged", "tokens_generated"), 0)
    return encode(ServerHeartbeat(version=0, groups_running=held, busy_s=1.0, uptime_s=1.0, **beat))


def client_process(pipe: Connection, endpoint: str, plain: bool, in_flight: int) -> None:
    hello = Hello(
        server_id="benchmark",
        session="benchmark",
        host_id="elsewhere",
        engine="benchmark",
        model_fingerprint="m",
        processor_fingerprint="p",
        max_groups=in_flight,
        pid=os.getpid(),
    )
    Client(pipe, endpoint, plain).run(encode(hello))


# --- the two learners -------------------------------------------------------------------------------


class PlainLearner:
    """A ROUTER that sends the frames of tickets and takes those of groups, as many at a time as have arrived."""

    def __init__(self, in_flight: int):
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
        while arrived < protocol.sockets.TURN_MESSAGES:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = identity.bytes
            arrived += len(frames) > 2
        if arrived:
            self._socket.send_multipart([peer, struct.pack("<3Q", arrived, 0, 0).ljust(self._ack_bytes)])
        self._send_tickets(peer, arrived or self._in_flight)

    def _send_tickets(self, peer: bytes, count: int) -> None:
        fixed, each = self._header_bytes
        header = struct.pack("<3Q", 0, self._next, count).ljust(fixed + count * each)
        images = [image((self._next + i) % KINDS)[1] for i in range(count)]
        self._next += count
        self._socket.send_multipart([peer, header, *images], copy=False)

    def close(self) -> None:
        self._socket.close()


def tickets_message(ids: Any) -> Tickets:
    items = [prepared(TicketSlot(i, i, 0, BOUND)) for i in ids]
    blobs = {digest: memoryview(data) for item in items for digest, data in item.blobs.items()}
    return Tickets(tickets=tuple(item.ticket for item in items), blobs=blobs)


class Learner:
    """The real exchange, ledger and journal; `serve` is the main thread, which takes batches as soon as it can."""

    def __init__(self, folder: Path, durability: Durability):
        folder.mkdir()
        ports = {"control_port": free_port(), "weights_port": free_port(), "timeout_s": 60.0}
        minimal = {"model": {"path": "none"}, "data": {"train_files": ["none"]}}
        reward = {"functions": [{"function": "exact_match"}]}
        config = RunConfig.model_validate({"run_dir": str(folder), **minimal, "reward": reward, "network": ports})
        self.endpoint = config.control_endpoint
        self.journal = Journal(folder / "journal.sqlite", durability)
        self.ledger = TicketLedger(self.journal, prompts_per_step=PER_STEP, bound=BOUND, total_groups=ENDLESS)
        self._publication = Publication("benchmark", folder)
        self.exchange = Exchange(
            config,
            "benchmark",
            ledger=self.ledger,
            write_ticket=prepared,
            publication=self._publication,
            facts=ModelFacts("m", "p", VOCABULARY),
            version=0,
        )
        self.exchange.start()
        self.exchange.admit(0)

    def serve(self, done: Connection) -> None:
        while not done.poll(0):
            with self.ledger.changed:
                if self.exchange.failure is not None:
                    raise self.exchange.failure
                if not self.ledger.ready():
                    self.ledger.changed.wait(0.05)
                    continue
            self.ledger.take()
            version = self.ledger.version + 1
            self.ledger.advance(version)
            if version % CHECKPOINT_EVERY == 0:
                self.ledger.forget_payloads(version)
            self.exchange.announce(WeightManifest(version=version, tensors=(), total_bytes=0))
            self.exchange.admit(version)

    def close(self) -> None:
        self.exchange.stop(None)
        assert self.ledger.counts().residual == 0
        assert not self.exchange.errors, self.exchange.errors
        self._publication.close()
        self.journal.close()


# --- measuring --------------------------------------------------------------------------------------


class Arm:
    """A learner here and its client in another process."""

    def __init__(self, learner: PlainLearner | Learner, in_flight: int):
        self.learner = learner
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (theirs, learner.endpoint, isinstance(learner, PlainLearner), in_flight)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=client_process, args=arguments, daemon=True)
        self._process.start()

    def round(self, groups: int) -> dict[str, float]:
        """Milliseconds per group: wall clock, and processor time of either process."""
        cpu = time.process_time()
        self._pipe.send(groups)
        self.learner.serve(self._pipe)
        wall_s, client_cpu_s = self._pipe.recv()
        seconds = {"wall": wall_s, "learner": time.process_time() - cpu, "client": client_cpu_s}
        return {name: 1000 * value / groups for name, value in seconds.items()}

    def close(self) -> None:
        self.learner.close()
        self._pipe.send(0)
        self._process.join(10)
        self._process.kill()


class Stopwatch:
    """Seconds inside of wrapped functions of one thread, without those of wrapped functions that they call."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._stack: list[float] = []
        self._thread: int | None = None

    def wrap(self, owner: Any, attribute: str, name: str) -> Any:
        function = getattr(owner, attribute)

        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name != "exchange":
                return function(*arguments, **options)
            self._stack.append(0.0)
            self.calls[name] += 1
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds = time.perf_counter() - started
                self.seconds[name] += seconds - self._stack.pop()
                if self._stack:
                    self._stack[-1] += seconds

        return patch.object(owner, attribute, timed)


def where_time_goes(arm: Arm, groups: int) -> dict[str, float]:
    """Milliseconds per group of each part of the exchange thread, in one round."""
    watch = Stopwatch()
    ledger, journal = TicketLedger, learner.journal
    parts = (
        (Exchange, "_receive_control", "other: receiving"),
        (LearnerSocket, "_take", "taking frames from the socket"),
        (protocol.sockets, "read_frames", "decode"),
        (learner.intake, "verify_group", "verify"),
        (journal, "pack_frames", "pack"),
        (journal.Journal, "add_group", "insert into SQLite (and checksum)"),
        (ledger, "receive", "commit, write-ahead log, ledger"),
        (learner.intake.Intake, "keep", "acknowledge"),
        (Handout, "_send_waiting", "tickets out"),
        (Handout, "_admit", "admission"),
        (Handout, "_write_some", "tickets: prepare and journal"),
    )
    with ExitStack() as stack:
        for owner, attribute, name in parts:
            stack.enter_context(watch.wrap(owner, attribute, name))
        wall = arm.round(groups)["wall"]
    shares = {name: 1000 * seconds / groups for name, seconds in watch.seconds.items()}
    print(watch.calls)
    return {**shares, "waiting, and the rest": wall - sum(shares.values())}


def journal_costs(folder: Path, durability: Durability, together: int, groups: int) -> dict[str, float]:
    """Milliseconds per group of the ledger's `receive`, of taking and of forgetting, and bytes per group on disk."""
    folder.mkdir()
    journal = Journal(folder / "journal.sqlite", durability)
    ledger = TicketLedger(journal, prompts_per_step=groups, bound=1, total_groups=groups)
    items = [prepared(slot) for slot in ledger.admissible(0)]
    ledger.issue(items)
    frames = [[bytes(frame) for frame in encode(group(n % KINDS, ticket_id=n))] for n in range(groups)]
    received = [
        ReceivedGroup(item, decode(each, (Group,), Limits()), each)  # type: ignore[arg-type]
        for item, each in zip(items, frames, strict=True)
    ]
    costs = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        started = time.perf_counter()
        action()
        costs[name] = costs.get(name, 0.0) + 1000 * (time.perf_counter() - started) / groups

    for start in range(0, groups, together):
        timed("journal", lambda: ledger.receive(received[start : start + together]))  # noqa: B023
    timed("flush", ledger.flush_journal)
    costs["bytes"] = journal.file_bytes / groups
    timed("take", ledger.take)
    timed("forget", lambda: ledger.forget_payloads(1))
    journal.close()
    return costs


@contextmanager
def arms(folder: Path, in_flight: int) -> Iterator[dict[str, Arm]]:
    opened: dict[str, Arm] = {}
    try:
        opened["plain"] = Arm(PlainLearner(in_flight), in_flight)
        for durability in ("process", "power"):
            opened[durability] = Arm(Learner(folder / durability, durability), in_flight)
        yield opened
    finally:
        for arm in opened.values():
            arm.close()


def throughput_table(rounds: list[dict[str, dict[str, float]]]) -> None:
    print("| learner | ms per group | groups/s | ratio to plain | from | to | CPU ms: learner | client |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in rounds[0]:
        wall, mine, theirs = (median(r[name][part] for r in rounds) for part in ("wall", "learner", "client"))
        ratios = [r["plain"]["wall"] / r[name]["wall"] for r in rounds]
        print(
            f"| {name} | {wall:.2f} | {1000 / wall:,.0f} | **{median(ratios):.2f}** | {min(ratios):.2f} | "
            f"{max(ratios):.2f} | {mine:.2f} | {theirs:.2f} |"
        )
    print(flush=True)


def journal_table(folder: Path, groups: int, repeats: int) -> None:
    print("| durability | groups per commit | journal ms | flush ms | take ms | forget ms | kB on disk |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    cases = [(durability, together) for durability in ("process", "power") for together in (1, 8)]
    found: dict[Any, list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for durability, together in cases:
            place = folder / f"{durability}-{together}-{repeat}"
            found[durability, together].append(journal_costs(place, durability, together, groups))
    for (durability, together), costs in found.items():
        middle = {name: median(c[name] for c in costs) for name in costs[0]}
        row = " | ".join(f"{middle[name]:.2f}" for name in ("journal", "flush", "take", "forget"))
        print(f"| {durability} | {together} | {row} | {middle['bytes'] / 1000:.0f} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200, help="per round")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--in-flight", type=int, default=32, help="groups that the client holds at once")
    parser.add_argument("--folder", type=Path, default=None, help="where the journals are written (and removed)")
    options = parser.parse_args()
    columns = [len(frame) for frame in encode(group(0))]
    print(
        f"{options.groups} groups of {sum(columns) / 1000:.0f} kB a round, images of {IMAGE_BYTES / 1000:.0f} kB, "
        f"{options.repeats} repeats, {options.in_flight} in flight; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, pyzmq {zmq.pyzmq_version()}, libzmq "
        f"{zmq.zmq_version()}, SQLite {sqlite3.sqlite_version}\n"
    )
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="asyncrl-bench-") as name:
        folder = Path(name)
        with arms(folder, options.in_flight) as opened:
            rounds = [
                {name: arm.round(options.groups) for name, arm in opened.items()} for _ in range(options.repeats + 1)
            ]
            throughput_table(rounds[1:])
            parts = where_time_goes(opened["process"], options.groups)
        print("| exchange thread, process | ms per group |\n|---|---:|")
        for part, milliseconds in parts.items():
            print(f"| {part} | {milliseconds:.3f} |")
        print(flush=True)
        journal_table(folder, min(options.groups, 128), options.repeats)
    print(f"Target: a ratio of at least {TARGET} for `process`.", flush=True)


if __name__ == "__main__":
    main()
