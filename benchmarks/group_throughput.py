"""Groups through the learner's intake, against plain pyzmq that moves the same bytes.

    python benchmarks/group_throughput.py [--groups 2000] [--repeats 10] [--in-flight 32] [--folder DIR]

A group is 8 completions of 2,048 tokens; its ticket carries one image of 500 kB. The learner is the real exchange with
a real ledger and a journal on disk: tickets with images go out, groups come in, are decoded, verified, journaled and
acknowledged, and a main thread takes batches and lets the journal forget them. The plain learner is a ROUTER that
sends the same frames and answers each turn's groups with one acknowledgement and one message of new tickets, as the
exchange does, and looks at nothing: once with pyzmq's own defaults, once without copies (`copy=False`), as our sockets
do it. Both talk over tcp on loopback to a DEALER in another process whose groups were made and encoded beforehand;
prompts are prepared beforehand, too.

The arms take turns. A round is long enough that what is put off (write-ahead log, forgotten groups, memory) is paid
for within it; it begins with groups that are not counted, and ends when every ticket that was under way has arrived.
Other work on the machine weighs more on the learner, which computes more: a round during which other processes used
over a third of a core is marked, and the medians are of the others where there are enough of them.

`--folder` should lie on the disk that runs would use: the journal is written there.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import sqlite3
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil
import zmq
from group_traffic import IMAGE_BYTES, KINDS, VOCABULARY, client_process, group, image, prepared

import learner.intake
import learner.journal
import protocol.sockets.learner
from asyncrl.config.schema import Durability, RunConfig
from learner.connections import ModelFacts
from learner.exchange import Exchange
from learner.handout import Handout
from learner.journal import Journal, TicketSlot
from learner.ledger import TicketLedger
from learner.segments import Segments
from protocol.codec import encode
from protocol.endpoints import free_port
from protocol.messages import Ack, Tickets, WeightManifest
from protocol.sockets import LearnerSocket
from protocol.weights import Publication

PER_STEP, BOUND, CHECKPOINT_EVERY = 32, 3, 4
"""Groups and steps. After each checkpoint the journal forgets the groups of its steps; no weights are saved."""
ENDLESS = 10**8
WARM_UP_GROUPS = 300
"""At the beginning of every round: caches, the processor's clock, buffers that grow."""
PAUSE_S = 0.1
"""Between rounds."""
BUSY_CORES = 1 / 3
"""Used by other processes: a round is then marked."""
ENOUGH_ROUNDS = 3
TARGET = 0.5
BASELINES = ("plain", "plain, no copies")


# --- the two learners -------------------------------------------------------------------------------


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
        while arrived < protocol.sockets.learner.TURN_MESSAGES:
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


@dataclass(frozen=True)
class Round:
    """Milliseconds per group, and how busy the machine was with something else."""

    wall: float
    learner: float
    """Processor time of the learner's process."""
    client: float
    others: float
    """Cores in use by other processes."""

    @property
    def is_quiet(self) -> bool:
        return self.others <= BUSY_CORES


def _busy_s() -> float:
    """Processor time of the whole machine, in work."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)


class Arm:
    """A learner here and its client in another process."""

    def __init__(self, learner: PlainLearner | Learner, in_flight: int):
        self.learner = learner
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (theirs, learner.endpoint, isinstance(learner, PlainLearner), in_flight)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=client_process, args=arguments, daemon=True)
        self._process.start()

    def round(self, groups: int) -> Round:
        time.sleep(PAUSE_S)
        started, cpu, busy, client = time.perf_counter(), time.process_time(), _busy_s(), self._client_cpu_s()
        self._pipe.send((WARM_UP_GROUPS, groups))
        self.learner.serve(self._pipe)
        wall_ms, client_ms = self._pipe.recv()
        cpu_s = time.process_time() - cpu
        others_s = _busy_s() - busy - cpu_s - (self._client_cpu_s() - client)
        others = others_s / (time.perf_counter() - started)
        return Round(wall_ms, 1000 * cpu_s / (WARM_UP_GROUPS + groups), client_ms, others)

    def _client_cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self.learner.close()
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


class Stopwatch:
    """Processor seconds of one thread in wrapped functions, without those of wrapped functions that they call."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stack: list[float] = []

    def wrap(self, owner: Any, attribute: str, name: str) -> Any:
        function = getattr(owner, attribute)

        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name != "exchange":
                return function(*arguments, **options)
            self._stack.append(0.0)
            started = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                seconds = time.thread_time() - started
                self.seconds[name] += seconds - self._stack.pop()
                if self._stack:
                    self._stack[-1] += seconds

        return patch.object(owner, attribute, timed)


def where_time_goes(arm: Arm, groups: int) -> dict[str, float]:
    """Milliseconds of processor time per group in each part of the exchange thread, in one round."""
    watch = Stopwatch()
    ledger, journal = TicketLedger, learner.journal
    parts = (
        (Exchange, "_receive_control", "other: receiving"),
        (LearnerSocket, "_take", "taking frames from the socket"),
        (protocol.sockets.learner, "read_frames", "decode"),
        (learner.intake.Intake, "accept", "verify"),
        (journal, "pack_frames", "pack"),
        (Segments, "append", "checksum, write to the segment"),
        (journal.Journal, "_write_groups", "insert into SQLite"),
        (ledger, "receive", "commit, write-ahead log, ledger"),
        (learner.intake.Intake, "keep", "acknowledge"),
        (Handout, "_send_waiting", "tickets out"),
        (Handout, "_admit", "admission"),
        (Handout, "_write_some", "tickets: prepare and journal"),
    )
    with ExitStack() as stack:
        for owner, attribute, name in parts:
            stack.enter_context(watch.wrap(owner, attribute, name))
        wall = arm.round(groups).wall
    shares = {name: 1000 * seconds / (WARM_UP_GROUPS + groups) for name, seconds in watch.seconds.items()}
    return {**shares, "waiting, and the rest": wall - sum(shares.values())}


@contextmanager
def arms(folder: Path, in_flight: int) -> Iterator[dict[str, Arm]]:
    opened: dict[str, Arm] = {}
    try:
        opened["plain"] = Arm(PlainLearner(in_flight, copy=True), in_flight)
        opened["plain, no copies"] = Arm(PlainLearner(in_flight, copy=False), in_flight)
        for durability in ("process", "power"):
            opened[durability] = Arm(Learner(folder / durability, durability), in_flight)
        yield opened
    finally:
        for arm in opened.values():
            arm.close()


def throughput_table(rounds: dict[str, list[Round]]) -> None:
    """Medians of the quiet rounds, where every arm has enough of them."""
    quiet = {name: [r for r in each if r.is_quiet] for name, each in rounds.items()}
    enough = all(len(each) >= ENOUGH_ROUNDS for each in quiet.values())
    chosen = quiet if enough else rounds
    wall = {name: median(r.wall for r in each) for name, each in chosen.items()}
    print("| learner | ms per group | groups/s | ratio to plain | to plain without copies | quiet rounds |", end="")
    print(" CPU ms: learner | client |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, each in chosen.items():
        ratios = " | ".join(f"**{wall[baseline] / wall[name]:.2f}**" for baseline in BASELINES)
        cpu = " | ".join(f"{median(getattr(r, side) for r in each):.2f}" for side in ("learner", "client"))
        counts = f"{len(quiet[name])} of {len(rounds[name])}"
        print(f"| {name} | {wall[name]:.3f} | {1000 / wall[name]:,.0f} | {ratios} | {counts} | {cpu} |")
    print(f"\nMedians of {'the quiet' if enough else 'all'} rounds. ms per group in each (* other processes", end="")
    print(f" used over {BUSY_CORES:.2f} cores):")
    for name, each in rounds.items():
        print(f"  {name:17s}", *(f"{r.wall:.3f}{' ' if r.is_quiet else '*'}" for r in each))
    if not enough:
        print("The machine was busy, with too few quiet rounds: these ratios say little, processor times more.")
    for baseline in BASELINES:
        ratio = wall[baseline] / wall["process"]
        verdict = ("met" if ratio >= TARGET else "missed") + ("" if enough else " (on a busy machine)")
        print(f"Target, at least {TARGET} of `{baseline}` for `process`: {ratio:.2f}, {verdict}.")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000, help="per round")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of each arm")
    parser.add_argument("--in-flight", type=int, default=32, help="groups that the client holds at once")
    parser.add_argument("--folder", type=Path, default=None, help="where the journals are written (and removed)")
    options = parser.parse_args()
    columns = [len(frame) for frame in encode(group(0))]
    print(
        f"Rounds of {options.groups} groups of {sum(columns) / 1000:.0f} kB, images of {IMAGE_BYTES / 1000:.0f} kB, "
        f"{options.in_flight} in flight; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}, SQLite "
        f"{sqlite3.sqlite_version}\n"
    )
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="asyncrl-bench-") as name:
        gc.freeze()  # as learner/__main__.py does
        with arms(Path(name), options.in_flight) as opened:
            rounds: dict[str, list[Round]] = {name: [] for name in opened}
            for _ in range(options.repeats):
                for arm_name, arm in opened.items():
                    rounds[arm_name].append(arm.round(options.groups))
            throughput_table(rounds)
            parts = where_time_goes(opened["process"], options.groups)
    print("| exchange thread, process | CPU ms per group |\n|---|---:|")
    for part, milliseconds in parts.items():
        print(f"| {part} | {milliseconds:.3f} |")
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
