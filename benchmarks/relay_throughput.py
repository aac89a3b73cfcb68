"""One version to several servers on this machine, with the learner sending it to all and through relays.

    python -m benchmarks.relay_throughput [--mib 1024] [--servers 8] [--fan-out 0 2]

Each server is a process of its own, with the sockets, the relay and the memory that a rollout server has, without an
engine. For each fan-out: seconds until the last server has the version with all its checksums, bytes that the learner
has sent, and the CPU time of all processes. Limits of the machine, in the same run: `memcpy`, copying the version's
bytes once for each server, and `loopback`, moving them over one plain TCP connection once for each server, one after
the other.
Memory: two versions at the learner's side, and one for each server.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.relays.puller import RelayPuller
from asyncrl_plugins.relays.tree import WeightTree
from benchmarks.staleness.workload import Workload
from benchmarks.weights_throughput import learner_process, make_tensors, receive_plainly
from protocol.download import answer_chunk_request
from protocol.messages import Chunk, ChunkRequest, SourceRequest, WeightManifest, WeightsFromLearner, WeightsFromServer
from protocol.sockets import LearnerSocket, Received, ServerSocket
from protocol.weights import Publication

LONGEST_S = 300.0


def server(number: int, config: RunConfig, endpoint: str, pipe: Connection) -> None:
    """Says when it is ready, gets a manifest, and answers with its own numbers when the version is here."""
    asyncio.run(_fetch(number, config, endpoint, pipe))


async def _fetch(number: int, config: RunConfig, endpoint: str, pipe: Connection) -> None:
    puller = RelayPuller(config.network, f"session-{number}")
    socket = ServerSocket(endpoint, WeightsFromLearner)
    pipe.send("ready")
    manifest: WeightManifest = await asyncio.to_thread(pipe.recv)
    into = memoryview(np.empty(manifest.total_bytes, np.uint8)).cast("B")
    before, began = time.process_time(), time.monotonic()
    await puller.receive(socket, manifest, into)
    pipe.send(time.monotonic() - began)
    await asyncio.to_thread(pipe.recv)  # the others have it, too
    pipe.send((time.process_time() - before, puller.received_bytes, puller.failures))
    puller.close()
    socket.close()


def run(mib: int, servers: int, fan_out: int, folder: Path) -> dict[str, float]:
    config = Workload(servers=servers, bound=1).config(timeout_s=120.0)
    context = multiprocessing.get_context("spawn")
    with Publication("relay-throughput", folder) as publication:
        manifest = publication.publish(1, make_tensors(mib << 20))
        socket = LearnerSocket("tcp://127.0.0.1:0", WeightsFromServer, setting="network.weights_port")
        sessions = {f"session-{number}": f"server-{number}" for number in range(servers)}
        known: Any = SimpleNamespace(
            connected={
                name: SimpleNamespace(hello=SimpleNamespace(session=session)) for session, name in sessions.items()
            },
            of_session=sessions.get,
            count_error=print,
        )
        tree, sent_bytes = WeightTree(fan_out or servers, known, publication), 0
        pipes, processes = [], []
        for number in range(servers):
            ours, theirs = context.Pipe()
            process = context.Process(target=server, args=(number, config, socket.endpoint, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            assert pipe.poll(LONGEST_S)
            pipe.recv()
        cpu, began = time.process_time(), time.monotonic()
        for pipe in pipes:
            pipe.send(manifest)
        done = 0
        while done < servers:
            assert time.monotonic() - began < LONGEST_S, f"{done} of {servers} servers have it"
            received = socket.recv(0.05)
            while isinstance(received, Received):
                answer: Any
                if isinstance(received.message, SourceRequest):
                    answer = tree.answer(received.message)
                else:
                    assert isinstance(received.message, ChunkRequest)
                    answer = answer_chunk_request(publication, received.message)
                    sent_bytes += answer.data.nbytes if isinstance(answer, Chunk) else 0
                socket.send(received.identity, answer)
                received = socket.recv()
            done += sum(bool(pipe.recv()) for pipe in pipes if pipe.poll(0))
        took, cpu = time.monotonic() - began, time.process_time() - cpu
        reports = []
        for pipe in pipes:
            pipe.send("end")
            reports.append(pipe.recv())
        for process in processes:
            process.join(30)
            process.kill()
        socket.close()
    failures = sum((Counter(report[2]) for report in reports), Counter[str]())
    return {
        "servers": servers,
        "seconds": took,
        "GB/s arriving": servers * manifest.total_bytes / took / 1e9,
        "learner sent, versions": sent_bytes / manifest.total_bytes,
        "learner CPU s": cpu,
        "servers' CPU s": sum(report[0] for report in reports),
        "failed sources": failures.total(),
    }


def limits(mib: int, servers: int) -> dict[str, float]:
    """Seconds that the machine needs at least for as many bytes."""
    source, target = np.random.default_rng(0).integers(0, 255, mib << 20, np.uint8), np.zeros(mib << 20, np.uint8)
    began = time.monotonic()
    for _ in range(servers):
        np.copyto(target, source)
    memcpy = time.monotonic() - began
    del source
    with learner_process(mib << 20) as (_manifest, _endpoint, address):
        view = memoryview(target).cast("B")[: _manifest.total_bytes]
        receive_plainly(address, view)
        began = time.monotonic()
        for _ in range(servers):
            receive_plainly(address, view)
        loopback = time.monotonic() - began
    return {"memcpy": memcpy, "loopback": loopback}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of the version, in MiB")
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--fan-out", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the version is published")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {arguments.mib} MiB\n", flush=True)
    floor = limits(arguments.mib, arguments.servers)
    for name, seconds in floor.items():
        print(f"{name}: {seconds:.2f} s for {arguments.servers} times the version")
    print(
        "\n| fan-out | servers | seconds | against loopback | GB/s arriving | versions sent by the learner | CPU s of "
        "the learner | of the servers | failed sources |\n|" + "---|" * 9
    )
    for fan_out in arguments.fan_out:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            row = run(arguments.mib, arguments.servers, fan_out, Path(folder))
        cells = [row["seconds"], row["seconds"] / floor["loopback"], *list(row.values())[2:]]
        print(f"| {fan_out} | {arguments.servers} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |", flush=True)
    print(f"\nlargest resident memory of a server: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10} MiB")


if __name__ == "__main__":
    main()
