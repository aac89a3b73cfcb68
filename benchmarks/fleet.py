"""Many rollout servers on one learner, over real sockets: what limits its front door, and what relays change.

    python -m benchmarks.fleet [--servers 1 16 128 1024] [--seconds 10] [--mib 1] [--tokens 128] [--link-mib-s 0]

The learner is the real network thread, ledger and journal, without a model; the servers are whole rollout servers with
the scripted engine, many in each of a few processes. For each number of servers, with the learner sending weights to
all and with relays:

- `publish`: from the announcement of a version to the last server that has loaded it, and what the learner has sent;
- groups/s and MB/s as they are journaled, the CPU time of the network thread as a share and for each group, against
  a bare ROUTER of pyzmq that receives the same bytes and answers each message, and plain writes of them into a file;
- `back`: from the start of another learner process's network thread on the same ports to the last server that is
  welcome again, and to the last that has its weights.

At the end the journal is opened again: every position of the data trained once, and the ledger adds up. With
`--link-mib-s` each sender sends so much in a second at most, as over a network, and only publications are timed.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from asyncrl.journal.writer import Journal
from asyncrl.launch.ports import free_port
from benchmarks.fleet_servers import Cell, narrow, serve
from benchmarks.staleness.workload import PROCESSOR, VOCABULARY
from learner.network.publication import source_opener
from learner.network.servers import ModelFacts
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.weights import Publication

PROCESSES = 4
LONGEST_S = 900.0
TOTAL_GROUPS = 10_000_000


class Learner:
    """A learner without a model, which can be stopped without a goodbye and started again."""

    def __init__(self, cell: Cell, folder: Path):
        self.cell, self.folder = cell, folder
        self.ports = (free_port(), free_port())
        self.version = 0
        self.start()

    def start(self) -> None:
        workload = self.cell.workload
        self.journal = Journal(self.folder / "journal.sqlite")
        self.ledger = TicketLedger(
            self.journal,
            prompts_per_step=workload.prompts_per_step,
            bound=1,
            total_groups=TOTAL_GROUPS,
            deadline=TicketDeadline(least_s=120.0, unmeasured_s=LONGEST_S),
        )
        self.publication = Publication("fleet", self.folder)
        config = self.cell.config(*self.ports)
        self.ledger.recover(workload.write_ticket, withhold_s=120.0)
        self.ledger.advance(self.version)
        self.network = NetworkThread(
            config.network_settings,
            "fleet",
            ledger=self.ledger,
            write_ticket=workload.write_ticket,
            publication=self.publication,
            facts=ModelFacts(self.cell.model, PROCESSOR, VOCABULARY),
            version=self.version,
            open_sources=source_opener(config.rollout),
        )
        self.started_at = time.monotonic()
        self.network.start()

    def stop(self, reason: str | None) -> None:
        self.network.stop(reason, run_is_finished=reason is not None)
        self.publication.close()
        self.journal.close()

    def wait(self, satisfied: Callable[[], bool], what: str) -> float:
        """Seconds until then."""
        began = time.monotonic()
        while not satisfied():
            self.network.check()
            if time.monotonic() - began > LONGEST_S:
                raise TimeoutError(f"waited {LONGEST_S:g} s for {what}: {len(self.network.servers.connected)} servers")
            time.sleep(0.005)
        return time.monotonic() - began

    def all_connected(self) -> bool:
        return len(self.network.servers.connected) == self.cell.servers

    def all_loaded(self) -> bool:
        servers = list(self.network.servers.connected.copy().values())
        return len(servers) == self.cell.servers and all(
            server.loaded is not None and server.loaded.version == self.version for server in servers
        )

    def publish(self) -> tuple[float, float, float]:
        """Seconds of the training thread, seconds to the last server, and versions' worth that the learner has sent."""
        sent = self.network.weights_sent_bytes
        weights = self.cell.weights(self.version)
        began = time.monotonic()
        manifest = self.publication.publish(self.version, weights)
        self.network.call_soon(self.network.servers.announce, manifest)
        ours = time.monotonic() - began
        self.wait(self.all_loaded, f"version {self.version}")
        times = (self.network.weights_sent_bytes - sent) / manifest.total_bytes
        return ours, time.monotonic() - began, times

    def take(self) -> int:
        """Take the groups of a step, and be at the next version. Bytes of the groups."""
        self.wait(self.ledger.ready, f"the groups of step {self.version + 1}")
        taken = self.ledger.take()
        self.version += 1
        self.ledger.advance(self.version)
        return sum(len(memoryview(frame)) for item in taken for frame in _frames(item))

    def admit(self) -> None:
        self.network.call_soon(self.network.tickets.admit, self.version)

    def is_quiet(self) -> bool:
        """True when every ticket that was admitted has its group here."""
        counts = self.ledger.counts()
        admitted = (1 + self.version + 1) * self.cell.workload.prompts_per_step
        return counts.issued == admitted and not counts.waiting + counts.in_flight

    def step(self) -> int:
        """One step of training without a model: the next version is announced, and nobody waits for it. Bytes."""
        nbytes = self.take()
        manifest = self.publication.publish(self.version, self.cell.weights(self.version))
        self.network.call_soon(self.network.servers.announce, manifest)
        self.admit()
        return nbytes

    def cpu_s(self) -> float:
        assert self.network.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.network.ident))


def _frames(item: Any) -> list[Any]:
    return [frame.buffer if isinstance(frame, zmq.Frame) else frame for frame in item.frames]


def measure(cell: Cell, folder: Path, seconds: float, publications: int) -> dict[str, float]:
    learner = Learner(cell, folder)
    context = multiprocessing.get_context("spawn")
    config, shares = cell.config(*learner.ports), np.array_split(np.arange(cell.servers), min(PROCESSES, cell.servers))
    pipes, processes = [], []
    for share in shares:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(cell, config, len(share), theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    row: dict[str, float] = {"servers": cell.servers}
    try:
        row["joined s"] = learner.wait(learner.all_connected, "the servers")
        learner.publish()  # sockets between servers are made
        measured = []
        for _ in range(publications):
            learner.admit()
            learner.wait(learner.is_quiet, "the groups that are out")
            learner.take()
            measured.append(learner.publish())
        print(f"seconds of each publication: {[round(each[1], 2) for each in measured]}", flush=True)
        row["publish, ms of training"], row["publish s"], row["versions sent"] = np.median(measured, axis=0).tolist()
        row["publish, ms of training"] *= 1000
        if not cell.link_mib_s:
            row |= _train(learner, seconds)
            print(f"{cell.servers} servers: {row}", flush=True)
            row |= _restart(learner)
    finally:
        learner.stop("the benchmark is over")
        reports = [pipe.recv() if pipe.poll(60) else (["no report"], {}, 0) for pipe in pipes]
        for process in processes:
            process.join(10)
            process.kill()
    problems = [problem for report in reports for problem in report[0]]
    row["failed sources"] = sum(report[2] for report in reports)
    assert not problems, problems[:3]
    if not cell.link_mib_s:
        row["trained once"] = check_exactly_once(folder, cell)
        size = round(row["bytes of a group"])
        row["us of bare pyzmq"] = 1e6 * raw_socket_s(size, 2000)
        row["bare disk MB/s"] = raw_disk(folder, size, 2000) / 1e6
    return row


def _train(learner: Learner, seconds: float) -> dict[str, float]:
    """Training at full speed: what the servers produce, or what the network thread can take."""
    learner.admit()
    learner.step()
    began, cpu, nbytes, steps = time.monotonic(), learner.cpu_s(), 0, 0
    while time.monotonic() - began < seconds:
        nbytes += learner.step()
        steps += 1
    took, cpu = time.monotonic() - began, learner.cpu_s() - cpu
    groups = steps * learner.cell.workload.prompts_per_step
    return {
        "groups/s": groups / took,
        "MB/s": nbytes / took / 1e6,
        "network share": cpu / took,
        "us of network per group": 1e6 * cpu / groups,
        "bytes of a group": nbytes / groups,
        "open files": len(os.listdir("/proc/self/fd")),
        "errors": float(learner.network.servers.errors.total()),
    }


def _restart(learner: Learner) -> dict[str, float]:
    """Stop as a crash does, and come back."""
    learner.stop(None)
    time.sleep(2.0)
    began = time.monotonic()
    learner.start()
    learner.wait(learner.all_connected, "the servers after the restart")
    welcome = time.monotonic() - began
    learner.publish()
    loaded = time.monotonic() - began
    learner.admit()
    for _ in range(2):
        learner.step()
    return {"back: welcome s": welcome, "back: loaded s": loaded}


def check_exactly_once(folder: Path, cell: Cell) -> int:
    """The number of groups that were trained; each once, by the journal."""
    journal = Journal(folder / "journal.sqlite")
    state = journal.state()
    live = len(state.waiting) + len(state.buffered)
    assert state.counters["issued"] == state.counters["trained"] + live, state.counters
    journal.close()
    with sqlite3.connect(folder / "journal.sqlite") as db:
        rows = db.execute("SELECT position, ticket_id FROM consumption ORDER BY position").fetchall()
        steps = db.execute("SELECT DISTINCT COUNT(*) FROM consumption GROUP BY step").fetchall()
    assert [position for position, _ in rows] == list(range(len(rows))), "every position once"
    assert len({ticket for _, ticket in rows}) == len(rows) == state.counters["trained"]
    assert steps == [(cell.workload.prompts_per_step,)]
    return len(rows)


def raw_socket_s(nbytes: int, messages: int) -> float:
    """CPU seconds that receiving one message of this size and answering it takes of a thread, with bare pyzmq."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    child = multiprocessing.get_context("spawn").Process(target=_raw_client, args=(port, nbytes, messages), daemon=True)
    child.start()
    spent = 0.0
    for number in range(messages):
        assert router.poll(60_000)
        if number == 1:
            spent = time.thread_time()
        identity, *_ = router.recv_multipart(copy=False)
        router.send_multipart([identity, b"acknowledged"], copy=False)
    spent = time.thread_time() - spent
    child.join(20)
    context.destroy(linger=0)
    return spent / (messages - 1)


def _raw_client(port: int, nbytes: int, messages: int) -> None:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    data, on_their_way = bytes(nbytes), 0
    for _ in range(messages):
        dealer.send(data)
        on_their_way += 1
        while on_their_way > 16:
            dealer.recv()
            on_their_way -= 1
    while on_their_way:
        dealer.recv()
        on_their_way -= 1


def raw_disk(folder: Path, nbytes: int, messages: int) -> float:
    """Bytes per second of plain writes of such messages into one file, not waiting for the disk, as the journal's."""
    data, path = os.urandom(nbytes), folder / "raw"
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(messages):
            file.write(data)
    took = time.perf_counter() - began
    path.unlink()
    return nbytes * messages / took


def table(rows: list[dict[str, float]], names: list[str]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(["weights from", *keys]) + " |\n|" + "---|" * (len(keys) + 1))
    for name, row in zip(names, rows, strict=True):
        print("| " + " | ".join([name, *(f"{row[key]:.4g}" if key in row else "" for key in keys)]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 16, 128, 1024])
    parser.add_argument("--seconds", type=float, default=10.0, help="of training in each cell")
    parser.add_argument("--mib", type=int, default=1, help="bytes of a version, in MiB")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion; 2 are a group")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--link-mib-s", type=float, default=0.0, help="MiB per second that a sender can send")
    parser.add_argument("--publications", type=int, default=2, help="timed in each cell, behind a first one")
    parser.add_argument("--folder", type=Path, default=None, help="of the journal; on the disk that runs would use")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # what a thousand servers come and go with
    if arguments.link_mib_s:
        narrow(arguments.link_mib_s)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {threading.active_count()} thread\n", flush=True)
    rows, names = [], []
    for servers, fan_out in product(arguments.servers, arguments.fan_out):
        cell = Cell(servers, arguments.mib, arguments.tokens, fan_out, arguments.link_mib_s)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows.append(measure(cell, Path(folder), arguments.seconds, arguments.publications))
        names.append(f"relays ({fan_out})" if fan_out else "learner")
        print(names[-1], {key: round(value, 4) for key, value in rows[-1].items()}, flush=True)
    print()
    table(rows, names)


if __name__ == "__main__":
    main()
