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
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil
import zmq
from group_learners import Learner, PlainLearner
from group_traffic import IMAGE_BYTES, client_process, group

import asyncrl.journal.writer
import learner.network.group_receiver
import protocol.sockets
from asyncrl.journal.data_files import DataFiles
from learner.network.thread import NetworkThread
from learner.network.ticket_sender import TicketSender
from learner.tickets.ledger import TicketLedger
from protocol.codec import encode
from protocol.sockets import LearnerSocket

WARM_UP_GROUPS = 300
"""Groups at the beginning of every round that fill caches, raise the processor's clock and grow buffers."""
PAUSE_S = 0.1
"""Pause between rounds."""
BUSY_CORES = 1 / 3
"""Used by other processes: a round is then marked."""
ENOUGH_ROUNDS = 3
TARGET = 0.5
BASELINES = ("plain", "plain, no copies")


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
            if threading.current_thread().name != "network":
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
    """Milliseconds of processor time per group in each part of the network thread, in one round."""
    watch = Stopwatch()
    ledger, journal = TicketLedger, asyncrl.journal.writer
    parts = (
        (NetworkThread, "_receive_control", "other: receiving"),
        (LearnerSocket, "_take", "taking frames from the socket"),
        (protocol.sockets, "decode", "decode"),
        (learner.network.group_receiver.GroupReceiver, "accept", "verify"),
        (journal, "pack_frames", "pack"),
        (DataFiles, "append", "checksum, write to the segment"),
        (journal.Journal, "_write_groups", "insert into SQLite"),
        (ledger, "receive", "commit, write-ahead log, ledger"),
        (learner.network.group_receiver.GroupReceiver, "keep", "acknowledge"),
        (TicketSender, "_send_waiting", "tickets out"),
        (ledger, "admissible", "admission"),
        (TicketSender, "_write_some", "tickets: prepare and journal"),
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
    print("| network thread, process | CPU ms per group |\n|---|---:|")
    for part, milliseconds in parts.items():
        print(f"| {part} | {milliseconds:.3f} |")
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
