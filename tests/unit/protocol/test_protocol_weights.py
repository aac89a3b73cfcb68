"""Weights arrive byte for byte, over shared memory and over ZeroMQ, or not at all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from protocol import weights
from protocol.download import MAX_CHUNK_BYTES, answer_chunk_request, fetch
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    Chunk,
    ChunkRequest,
    Error,
    WeightManifest,
    WeightsFromLearner,
    WeightsFromServer,
)
from protocol.sockets import LearnerSocket, Received, ServerSocket
from protocol.weight_file import (
    ALIGNMENT,
    ITEMSIZE,
    PublicationError,
    WeightFile,
    check_manifest,
    map_for_reading,
    open_shm,
)
from protocol.weights import Publication, Tensor, remove_stale
from tests.rigs.tiny import ROOT

WAIT_S = 10.0


def make_tensors(seed: int = 0, large: int = 100_000) -> list[Tensor]:
    """Odd sizes, an empty tensor, a scalar, several dtypes."""
    random = np.random.default_rng(seed)
    return [
        Tensor(name, dtype, shape, (memoryview(random.bytes(int(np.prod(shape)) * ITEMSIZE[dtype])),))
        for name, dtype, shape in (
            ("embed", "bfloat16", (large, 3)),
            ("bias", "float32", (7,)),
            ("empty", "float32", (0, 4)),
            ("scale", "float64", ()),
            ("mask", "bool", (13,)),
        )
    ]


@pytest.fixture
def publication(tmp_path: Path) -> Iterator[Publication]:
    with Publication("run-1", tmp_path) as opened:
        yield opened


def assert_equals(tensors: list[Tensor], views: dict[str, memoryview]) -> None:
    assert {t.name: b"".join(t.pieces) for t in tensors} == {name: bytes(view) for name, view in views.items()}


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", "float32", (2,), 8), ("a", "float32", (2,), 8)], "'a' is listed twice"),
        ([("a", "complex64", (2,), 16)], "dtype 'complex64'"),
        ([("a", "float32", (2,), 7)], r"float32\[2\] does not have 7 bytes"),
        ([("a", "float32", (-1, -2), 8)], r"cannot have the shape \[-1, -2\]"),
        ([], "nothing to publish"),
    ],
)
def test_impossible_tensors(
    publication: Publication, tmp_path: Path, tensors: list[tuple[str, str, tuple[int, ...], int]], message: str
):
    given = [Tensor(name, dtype, shape, [memoryview(bytes(nbytes))]) for name, dtype, shape, nbytes in tensors]
    with pytest.raises(PublicationError, match=message):
        publication.publish(1, given)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"], "no partial file stays behind"


# --- shared memory --------------------------------------------------------------------------------


def test_shared_memory_is_byte_for_byte_equal(publication: Publication):
    tensors = make_tensors()
    manifest = publication.publish(3, tensors)
    views = open_shm(manifest)
    assert_equals(tensors, views)
    assert all(view.readonly for view in views.values())
    ends = [0, *(entry.offset + entry.nbytes for entry in manifest.tensors)]
    for entry, end in zip(manifest.tensors, ends, strict=False):
        assert entry.offset % ALIGNMENT == 0
        assert end <= entry.offset < end + ALIGNMENT
    assert manifest.total_bytes == ends[-1]


def gone(call: Callable[[], object]) -> str:
    """The reason of the VERSION_GONE that `call` ends with."""
    with pytest.raises(ProtocolError) as caught:
        call()
    assert caught.value.code is ErrorCode.VERSION_GONE
    return caught.value.reason


def test_the_newest_two_versions_are_kept(publication: Publication, tmp_path: Path):
    manifests = [publication.publish(version, make_tensors(version)) for version in (1, 2, 5)]
    assert publication.versions == (2, 5)
    assert sorted(path.suffix or path.name[-3:] for path in tmp_path.iterdir()) == ["-v2", "-v5", ".lock"]
    assert "there is 2, 5" in gone(lambda: publication.read(1, 0, 10))
    gone(lambda: open_shm(manifests[0]))
    assert publication.manifest(5) == manifests[2]


def test_a_mapped_version_outlives_its_replacement(publication: Publication):
    tensors = make_tensors(1)
    mapped = open_shm(publication.publish(1, tensors))
    for version in (2, 3, 4):
        publication.publish(version, make_tensors(version))
    publication.close()
    assert_equals(tensors, mapped)


@pytest.fixture
def refilled(tmp_path: Path) -> Iterator[Publication]:
    """Fills files again, as publications in shared memory do."""
    with Publication("run-2", tmp_path, refill=True) as opened:
        yield opened


def inode(manifest: WeightManifest) -> int:
    return os.stat(manifest.shm_path).st_ino


def test_the_file_of_a_dropped_version_is_filled_again_with_one_of_its_size(refilled: Publication, tmp_path: Path):
    manifests, inodes = [], []
    for version in range(1, 7):
        manifests.append(refilled.publish(version, make_tensors(version)))
        inodes.append(inode(manifests[-1]))
        assert_equals(make_tensors(version), open_shm(manifests[-1]))
    assert inodes == inodes[:2] * 3, "two files serve all versions"
    assert len(list(tmp_path.iterdir())) == 3
    gone(lambda: open_shm(manifests[3]))
    assert_equals(make_tensors(5), open_shm(manifests[4]))
    other = make_tensors(7, large=10)
    assert_equals(other, open_shm(refilled.publish(7, other)))


def test_a_file_is_filled_again_with_more_or_less_than_it_held(refilled: Publication):
    for version, large in enumerate((100, 100, 400_000, 50, 500_000, 400_000), 1):
        tensors = make_tensors(version, large)
        manifest = refilled.publish(version, tensors)
        assert os.stat(manifest.shm_path).st_size == manifest.total_bytes
        assert_equals(tensors, open_shm(manifest))


def test_pieces_may_all_come_in_the_same_memory(publication: Publication):
    """As from a GPU: what a piece was read from holds the next one. Several threads copy a large one."""
    sizes, bucket = [3 << 20, 5, 2 << 20, 0, 1 << 20], bytearray(3 << 20)
    given = [np.random.default_rng(size).bytes(size) for size in sizes]

    def pieces() -> Iterator[memoryview]:
        for data in given:
            bucket[:] = bytes(len(bucket))
            bucket[: len(data)] = data
            yield memoryview(bucket)[: len(data)]

    manifest = publication.publish(1, [Tensor("w", "uint8", (sum(sizes),), pieces())])
    assert open_shm(manifest)["w"] == b"".join(given)


def test_a_full_directory_lets_all_tensors_be_gathered(publication: Publication, monkeypatch: pytest.MonkeyPatch):
    """The other ranks gather them, too: they would wait for one that has given up."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    asked: list[str] = []

    def tensors() -> Iterator[Tensor]:
        for tensor in make_tensors():
            asked.append(tensor.name)
            yield tensor

    monkeypatch.setattr(WeightFile, "_write", full)
    with pytest.raises(PublicationError, match="1 MiB"):
        publication.publish(1, tensors())
    assert asked == [tensor.name for tensor in make_tensors()]


def test_a_file_that_is_still_read_is_not_filled_again(refilled: Publication):
    """Bytes that a server has mapped, or that a chunk is sending, stay as they were."""
    first = refilled.publish(1, make_tensors(1))
    mapped = open_shm(first)
    chunk = refilled.publish(2, make_tensors(2)) and refilled.read(2, 0, 1000)
    used = {inode(first), inode(refilled.manifest(2))}
    for version in (3, 4, 5):
        assert inode(refilled.publish(version, make_tensors(version))) not in used
    kept = mapped.pop("embed")
    del mapped
    assert bytes(kept) == b"".join(make_tensors(1)[0].pieces), "one view keeps the whole mapping"
    assert bytes(chunk) == b"".join(make_tensors(2)[0].pieces)[:1000]


def test_a_reader_that_comes_while_a_file_is_filled_is_told_that_its_version_has_gone(tmp_path: Path):
    """The reader has opened the file under its old name, but locks it too late."""
    file = WeightFile.create(tmp_path / "v1")
    with ThreadPoolExecutor() as pool:
        file.put(0, [memoryview(b"11"), memoryview(b"11")], pool)
    file.finish(4)
    file.show(tmp_path / "v1")
    assert file.take_back(tmp_path / "v3")
    os.link(file.path, tmp_path / "v1")  # as if it had been opened before it was taken back
    with pytest.raises(FileNotFoundError, match="is being filled"):
        map_for_reading(tmp_path / "v1", 4)
    with ThreadPoolExecutor() as pool:
        assert file.put(0, [memoryview(b"3333")], pool) == (4, xxhash.xxh3_64_intdigest(b"3333"))
    file.show(tmp_path / "v3")
    held = map_for_reading(tmp_path / "v3", 4)
    assert bytes(held) == b"3333"
    assert not file.take_back(tmp_path / "v5"), "it is still read"
    file.remove()
    assert bytes(held) == b"3333"


def test_a_file_with_other_bytes_is_recognised(publication: Publication):
    manifest = publication.publish(1, make_tensors())
    with open(manifest.shm_path, "r+b") as file:
        file.seek(manifest.tensors[1].offset)
        file.write(b"overwritten")
    assert "checksum of 'bias'" in gone(lambda: open_shm(manifest))
    os.truncate(manifest.shm_path, 100)
    assert "shorter" in gone(lambda: open_shm(manifest))


def test_manifests_that_contradict_themselves_are_refused(publication: Publication):
    manifest = publication.publish(1, make_tensors())
    first, *rest = manifest.tensors
    for changes in (
        {"total_bytes": manifest.total_bytes + 64},
        {"tensors": (first.model_copy(update={"offset": 128}), *rest)},
        {"tensors": (first.model_copy(update={"nbytes": 10}), *rest)},
        {"tensors": (first, first)},
        {"tensors": (), "total_bytes": 0},
        {"shm_path": "/etc/hostname"},
    ):
        broken = manifest.model_copy(update=changes)
        with pytest.raises(ProtocolError) as caught:
            open_shm(broken)
        assert caught.value.code is ErrorCode.MALFORMED
    check_manifest(manifest)


def test_versions_must_grow_and_a_closed_publication_refuses(publication: Publication, tmp_path: Path):
    publication.publish(2, make_tensors())
    with pytest.raises(PublicationError, match="version 2 is not newer than 2"):
        publication.publish(2, make_tensors())
    publication.close()
    publication.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PublicationError, match="closed"):
        publication.publish(3, make_tensors())
    with pytest.raises(PublicationError, match="is not a directory"):
        Publication("run", tmp_path / "missing")


def test_a_full_directory_is_explained(publication: Publication, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(_file: WeightFile, _offset: int, _view: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WeightFile, "_write", full)
    with pytest.raises(PublicationError, match=r"needs 7 MiB .* free of .*--shm-size=13m, .*ASYNCRL_SHM_SIZE=13m"):
        publication.publish(1, make_tensors(large=1 << 20))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"], "no partial file stays behind"


@pytest.mark.parametrize("folder", ["/proc", "/proc/sys", "/proc/self"])
def test_shared_memory_that_may_not_be_written_is_told_before_anything_is_published(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Folders in which even root makes no file."""
    monkeypatch.setattr(weights, "SHARED_MEMORY", Path(folder))
    with pytest.raises(PublicationError, match=rf"cannot be published in {folder}: .* chmod 1777 {folder}; .*SHM_SIZE"):
        weights.publication_folder()


@pytest.mark.parametrize("where", ["put", "show", "map_for_reading"])
def test_an_interrupted_publication_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    """Ctrl-C may come at any moment; no other process removes a file whose lock has gone."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Publication("run", tmp_path) as publication:
        publication.publish(1, make_tensors())
        monkeypatch.setattr(weights if where == "map_for_reading" else WeightFile, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            publication.publish(2, make_tensors())
    assert list(tmp_path.iterdir()) == []


CRASHING_LEARNER = """
import sys, time
from pathlib import Path
from protocol.weights import Publication, Tensor
publication = Publication("crash", Path(sys.argv[1]))
publication.publish(1, [Tensor("w", "uint8", (100,), [memoryview(bytes(100))])])
print("ready", flush=True)
time.sleep(60)
"""


def test_files_of_a_killed_learner_are_removed_and_those_of_a_living_one_stay(tmp_path: Path):
    command = [sys.executable, "-c", CRASHING_LEARNER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as crashing:
        assert crashing.stdout is not None
        assert crashing.stdout.readline() == "ready\n"
        left = sorted(tmp_path.iterdir())
        assert len(left) == 2
        assert str(crashing.pid) in left[0].name
        assert remove_stale(tmp_path) == [], "it is alive"
        crashing.kill()
    with Publication("next", tmp_path):
        assert not any(path.exists() for path in left)
        assert len(list(tmp_path.iterdir())) == 1


# --- over ZeroMQ ----------------------------------------------------------------------------------


@contextmanager
def serving(
    publication: Publication,
    behave: Callable[[ChunkRequest], bool] = lambda _: True,
) -> Iterator[LearnerSocket]:
    """A learner's weights endpoint in a thread; a request for which `behave` is False gets no answer."""
    sock = LearnerSocket("tcp://127.0.0.1:0", WeightsFromServer, setting="port", linger_s=0)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            received = sock.recv(0.02)
            if not isinstance(received, Received):
                continue
            assert isinstance(received.message, ChunkRequest)
            if behave(received.message):
                sock.send(received.identity, answer_chunk_request(publication, received.message))
        sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield sock
    finally:
        stop.set()
        thread.join(timeout=WAIT_S)


def pull(endpoint: str, manifest: WeightManifest, **options: float) -> bytearray | Exception:
    """Fetch one version; returns its bytes or the error."""

    async def run() -> bytearray | Exception:
        sock = ServerSocket(endpoint, WeightsFromLearner, linger_s=0)
        into = bytearray(manifest.total_bytes)
        chosen: dict[str, Any] = {"timeout_s": WAIT_S, "chunk_bytes": 50_000, "retry_s": 0.1, **options}
        try:
            await fetch(sock, manifest, into, **chosen)
            return into
        except (ProtocolError, TimeoutError) as problem:
            return problem
        finally:
            sock.close()

    return asyncio.run(run())


def views_of(manifest: WeightManifest, data: bytearray | Exception) -> dict[str, memoryview]:
    assert isinstance(data, bytearray), data
    return {t.name: memoryview(data)[t.offset : t.offset + t.nbytes] for t in manifest.tensors}


@pytest.mark.parametrize(("chunk_bytes", "large"), [(1, 50), (1 << 20, 100_000)])
def test_zmq_equals_shared_memory(publication: Publication, chunk_bytes: int, large: int):
    tensors = make_tensors(large=large)
    manifest = publication.publish(1, tensors)
    with serving(publication) as sock:
        data = pull(sock.endpoint, manifest, chunk_bytes=chunk_bytes)
    assert_equals(tensors, views_of(manifest, data))
    assert_equals(tensors, open_shm(manifest))


def test_only_lost_chunks_are_asked_for_again(publication: Publication):
    tensors = make_tensors()
    manifest = publication.publish(1, tensors)
    asked: list[int] = []

    def lose_each_third_once(request: ChunkRequest) -> bool:
        asked.append(request.offset)
        return not (request.offset // 50_000 % 3 == 0 and asked.count(request.offset) == 1)

    with serving(publication, lose_each_third_once) as sock:
        data = pull(sock.endpoint, manifest)
    assert_equals(tensors, views_of(manifest, data))
    for index, offset in enumerate(range(0, manifest.total_bytes, 50_000)):
        assert asked.count(offset) == (2 if index % 3 == 0 else 1)


@pytest.mark.parametrize(
    ("chunks", "seconds", "retry_s", "sent_twice"), [(30, 0.03, 0.4, 0), (12, 0.2, 0.15, 8)], ids=["slow", "very slow"]
)
def test_over_a_slow_link_readers_ask_for_chunks_once(
    publication: Publication, chunks: int, seconds: float, retry_s: float, sent_twice: int
):
    """They share the sender's queue: with a whole window of the first in it, the second would wait for longer than
    retry_s. Where one chunk takes longer than that, readers learn it from the first few."""
    tensors = make_tensors()
    manifest = publication.publish(1, tensors)
    sock = LearnerSocket("tcp://127.0.0.1:0", WeightsFromServer, setting="port", linger_s=0)
    asked: list[int] = []
    options = {"chunk_bytes": manifest.total_bytes // chunks, "retry_s": retry_s}

    def serve() -> None:
        queue: deque[Received] = deque()
        while not all(future.done() for future in futures):
            while (received := sock.recv(0.0 if queue else 0.02)) is not None:
                assert isinstance(received, Received)
                queue.append(received)
            if queue:
                request = queue.popleft()
                assert isinstance(request.message, ChunkRequest)
                asked.append(request.message.offset)
                time.sleep(seconds)
                sock.send(request.identity, answer_chunk_request(publication, request.message))

    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(pull, sock.endpoint, manifest, **options)]
        sender = threads.submit(serve)
        time.sleep(0.15)
        futures.append(threads.submit(pull, sock.endpoint, manifest, **options))
        for future in futures:
            assert_equals(tensors, views_of(manifest, future.result()))
        sender.result()
    sock.close()
    assert len(asked) <= 2 * len({*asked}) + sent_twice


def test_a_version_that_goes_during_the_transfer_ends_it_and_the_next_one_works(publication: Publication):
    old = publication.publish(1, make_tensors(1))
    new: list[WeightManifest] = []

    def move_on_after_three(_request: ChunkRequest) -> bool:
        served.append(1)
        if len(served) == 4:
            publication.publish(2, make_tensors(2))
            new.append(publication.publish(3, make_tensors(3)))
        return True

    served: list[int] = []
    with serving(publication, move_on_after_three) as sock:
        ended = pull(sock.endpoint, old, window=2)
        data = pull(sock.endpoint, new[0])
    assert isinstance(ended, ProtocolError)
    assert ended.code is ErrorCode.VERSION_GONE
    assert_equals(make_tensors(3), views_of(new[0], data))


def test_a_silent_learner_is_named_after_the_deadline(publication: Publication):
    manifest = publication.publish(1, make_tensors())
    start = time.monotonic()
    with serving(publication, lambda _: False) as sock:
        problem = pull(sock.endpoint, manifest, timeout_s=0.4)
    assert isinstance(problem, TimeoutError)
    assert sock.endpoint in str(problem)
    assert "13 of 13 chunks of version 1" in str(problem)
    assert time.monotonic() - start < 3.0


def test_corrupted_bytes_are_fetched_again_and_then_refused(publication: Publication):
    manifest = publication.publish(1, make_tensors())
    wrong = manifest.tensors[1].model_copy(update={"xxh3": 1})
    asked: list[int] = []
    broken = manifest.model_copy(update={"tensors": (manifest.tensors[0], wrong, *manifest.tensors[2:])})
    with serving(publication, lambda request: asked.append(request.offset) is None) as sock:
        problem = pull(sock.endpoint, broken)
    assert isinstance(problem, ProtocolError)
    assert problem.code is ErrorCode.MALFORMED
    assert "'bias'" in problem.reason
    assert asked[13:] == [wrong.offset], "only the damaged tensor travels again"


def test_chunk_requests_are_answered_or_refused(publication: Publication):
    total = publication.publish(1, make_tensors()).total_bytes
    good = answer_chunk_request(publication, ChunkRequest(version=1, publication=publication.id, offset=10, nbytes=20))
    assert isinstance(good, Chunk)
    assert good.data.nbytes == 20
    for version, whose, offset, nbytes, code in (
        (0, publication.id, 0, 10, ErrorCode.VERSION_GONE),
        (1, "another", 10, 20, ErrorCode.VERSION_GONE),
        (1, publication.id, total, 10, ErrorCode.MALFORMED),
        (1, publication.id, 0, MAX_CHUNK_BYTES + 1, ErrorCode.TOO_LARGE),
    ):
        refused = answer_chunk_request(
            publication, ChunkRequest(version=version, publication=whose, offset=offset, nbytes=nbytes)
        )
        assert isinstance(refused, Error)
        assert refused.code is code
        assert refused.version == version
