"""Publication of weights against the plain movement of the same bytes, in turn, in one run.

    python benchmarks/weights_throughput.py [--mib 1024] [--repeats 7]

`shm`: the learner writes a version with checksums and manifest, against `numpy.copyto` of the same bytes. The first
versions of a run fill new files, so they are compared with a copy into newly allocated memory; later ones fill files
that are there already, and are compared with a copy into memory that is there already (by far the harder comparison).
`zmq`: a rollout server pulls a version, checksums verified, from another process, against a TCP connection over
loopback that moves the same bytes between the same two processes into the same buffer.
Ratios are medians of the ratios of each repeat. The limit for each is 1.5.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import zmq

from protocol.download import answer_chunk_request, fetch
from protocol.messages import ChunkRequest, WeightManifest, WeightsFromLearner, WeightsFromServer
from protocol.sockets import LearnerSocket, Received, ServerSocket
from protocol.weight_file import open_shm
from protocol.weights import Publication, Tensor

LAYERS, PER_LAYER = 28, 8
SEND_BYTES, RECEIVE_BYTES = 1 << 20, 1 << 18
"""Frame size of the plain connection: the fastest of 64 KiB to 4 MiB where this was written."""
TIMEOUT_S = 60.0


def make_tensors(nbytes: int) -> list[Tensor]:
    """One large embedding and many matrices in bfloat16, views of one array of random bytes."""
    block = np.random.default_rng(0).bytes(1 << 20)
    source = memoryview(np.frombuffer(block * (nbytes >> 20), np.uint8))
    embedding = nbytes // 8
    size = (nbytes - embedding) // (LAYERS * PER_LAYER) // 2 * 2
    sizes = [embedding, *[size] * (LAYERS * PER_LAYER)]
    starts = [0, *np.cumsum(sizes).tolist()]
    return [
        Tensor(f"tensor.{n}", "bfloat16", (size // 2,), [source[start : start + size]])
        for n, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def copy(tensors: list[Tensor], into: np.ndarray) -> None:
    """Copy the tensors, one after another, by one thread."""
    end = 0
    for piece in (piece for tensor in tensors for piece in tensor.pieces):
        np.copyto(into[end : end + piece.nbytes], np.frombuffer(piece, np.uint8))
        end += piece.nbytes


def shared_memory(tensors: list[Tensor]) -> Iterator[dict[str, float]]:
    """Seconds of each part, once per iteration."""
    nbytes = sum(piece.nbytes for tensor in tensors for piece in tensor.pieces)
    warm = np.zeros(nbytes, np.uint8)
    with Publication("benchmark") as publication:
        version = 0
        while True:
            seconds = {}
            with Publication("benchmark-new") as new:
                seconds["copy, new memory"] = timed(lambda: copy(tensors, np.empty(nbytes, np.uint8)))
                seconds["publish, new file"] = timed(lambda: new.publish(0, tensors))
            seconds["copy, same memory"] = timed(lambda: copy(tensors, warm))
            version += 1
            seconds["publish, same file"] = timed(lambda: publication.publish(version, tensors))  # noqa: B023
            started = time.perf_counter()
            mapped = open_shm(publication.manifest(version))
            seconds["read: map and verify"] = time.perf_counter() - started
            views = [Tensor(n, "uint8", (v.nbytes,), [v]) for n, v in mapped.items()]
            seconds["read: copy into the model"] = timed(lambda: copy(views, warm))  # noqa: B023
            del mapped, views  # the last views: the file may be filled again
            yield seconds


def learner(pipe: Connection, nbytes: int) -> None:
    """The other process: serves chunks, and sends everything plainly to whoever asks for it."""
    tensors = make_tensors(nbytes)
    plain = socket.create_server(("127.0.0.1", 0))
    with Publication("benchmark-zmq") as publication:
        manifest = publication.publish(1, tensors)
        bytes_of_version = publication.read(1, 0, manifest.total_bytes)
        endpoint = LearnerSocket("tcp://127.0.0.1:0", WeightsFromServer, setting="network.weights_port")
        pipe.send((manifest, endpoint.endpoint, plain.getsockname()))
        poller = zmq.Poller()
        for readable in (endpoint.socket, plain.fileno(), pipe.fileno()):
            poller.register(readable, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if pipe.fileno() in ready:
                break
            if plain.fileno() in ready:
                with plain.accept()[0] as connection:
                    for start in range(0, manifest.total_bytes, SEND_BYTES):
                        connection.sendall(bytes_of_version[start : start + SEND_BYTES])
            while isinstance(received := endpoint.recv(), Received):
                assert isinstance(received.message, ChunkRequest)
                endpoint.send(received.identity, answer_chunk_request(publication, received.message))
        endpoint.close()
        bytes_of_version.release()


def receive_plainly(address: tuple[str, int], into: memoryview) -> None:
    got = 0
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        while got < into.nbytes:
            received = connection.recv_into(into[got : got + RECEIVE_BYTES])
            if not received:
                raise ConnectionError(f"the sender stopped after {got} bytes")
            got += received


@contextmanager
def learner_process(nbytes: int) -> Iterator[tuple[WeightManifest, str, tuple[str, int]]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=learner, args=(theirs, nbytes), daemon=True)
    process.start()
    try:
        yield ours.recv()
        ours.send("end")
        process.join(TIMEOUT_S)
    finally:
        process.kill()


async def network(nbytes: int, repeats: int) -> list[dict[str, float]]:
    """Seconds of each part, per repeat."""
    with learner_process(nbytes) as (manifest, endpoint, address):
        buffer = memoryview(bytearray(manifest.total_bytes))
        server = ServerSocket(endpoint, WeightsFromLearner)
        rounds = []
        for _ in range(repeats + 1):
            buffer[:] = bytes(1) * buffer.nbytes
            seconds = {"loopback": timed(lambda: receive_plainly(address, buffer))}
            buffer[:] = bytes(1) * buffer.nbytes  # so that a checksum can only pass if the bytes came
            started = time.perf_counter()
            await fetch(server, manifest, buffer, timeout_s=TIMEOUT_S)
            seconds["pull"] = time.perf_counter() - started
            rounds.append(seconds)
        server.close()
    return rounds[1:]


def table(rounds: list[dict[str, float]], gib: float, baselines: dict[str, str]) -> None:
    print("| what | median s | GiB/s | against | ratio | from | to |\n|---|---|---|---|---|---|---|")
    for name in rounds[0]:
        seconds = median(r[name] for r in rounds)
        row = f"| {name} | {seconds:.3f} | {gib / seconds:.1f} |"
        if name in baselines:
            ratios = [r[name] / r[baselines[name]] for r in rounds]
            row += f" {baselines[name]} | **{median(ratios):.2f}** | {min(ratios):.2f} | {max(ratios):.2f} |"
        else:
            row += " | | | |"
        print(row, flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of one version, in MiB")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    nbytes, gib = arguments.mib << 20, arguments.mib / 1024
    print(f"{arguments.mib} MiB, {arguments.repeats} repeats, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    parts = shared_memory(make_tensors(nbytes))
    # Two files are filled for the first time, and once more mapped for the first time, before they are only reused.
    rounds = [next(parts) for _ in range(arguments.repeats + 4)][4:]
    parts.close()
    pairs = {"publish, new file": "copy, new memory", "publish, same file": "copy, same memory"}
    table(rounds, gib, {**pairs, "read: copy into the model": "copy, same memory"})
    table(asyncio.run(network(nbytes, arguments.repeats)), gib, {"pull": "loopback"})


if __name__ == "__main__":
    main()
