"""Memory of transfers on a GPU, with stand-ins for CUDA's streams and torch's allocator: not run on a GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import xxhash

from asyncrl_plugins.device_channels import sender, stage
from asyncrl_plugins.device_channels.flat import OwnStreams, release
from asyncrl_plugins.device_channels.sender import DeviceWeights
from asyncrl_plugins.device_channels.stage import Stage, StageOrder
from protocol.messages import TensorEntry

GPU, CPU, BYTES = torch.device("cuda:0"), torch.device("cpu"), 64


class Allocator:
    """Torch's caching allocator, as far as it matters: memory that is free belongs to the stream it was taken for."""

    def __init__(self) -> None:
        self.stream = "default"
        self.streams = 0
        self.cached: Counter[str] = Counter()
        self.reserved = 0

    def new_stream(self, device: torch.device) -> str:
        self.streams += 1
        return f"stream {self.streams}"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def take(self) -> str:
        if self.cached[self.stream]:
            self.cached[self.stream] -= 1
        else:
            self.reserved += 1
        return self.stream

    def empty_cache(self) -> None:
        self.reserved -= self.cached.total()
        self.cached.clear()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "Stream", made.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: made.on(made.stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    return made


def test_transfers_one_after_the_other_take_the_memory_of_one_version(allocator: Allocator) -> None:
    streams = OwnStreams(GPU)
    for _ in range(5):
        with streams.one():
            taken = allocator.take()
        allocator.cached[taken] += 1
    assert (allocator.streams, allocator.reserved) == (1, 1)
    release(GPU)
    assert allocator.reserved == 0


def test_transfers_at_the_same_time_are_on_different_streams_which_are_used_again(allocator: Allocator) -> None:
    streams = OwnStreams(GPU)
    for _ in range(3):
        with streams.one():
            one = allocator.stream
            with streams.one():
                assert allocator.stream != one
    with pytest.raises(ValueError, match="cut off"), streams.one():
        raise ValueError("cut off")
    assert allocator.streams == 2


def test_a_cpu_has_no_streams(allocator: Allocator) -> None:
    with OwnStreams(CPU).one():
        pass
    release(CPU)
    assert allocator.streams == 0


def test_a_receiver_has_its_streams_for_all_versions_and_gives_each_back_as_it_drops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(stage, "release", released.append)
    monkeypatch.setattr(Stage, "_fill", lambda self, flat, *_: flat.fill_(7))
    receiver = Stage(CPU)
    used: list[OwnStreams] = []
    monkeypatch.setattr(OwnStreams, "one", noted(used, OwnStreams.one))
    for version in range(1, 4):
        receiver.begin(order(version), rank=1)
        wait_until(lambda: receiver.arrival.is_done)
        receiver.drop()
        receiver.drop()
    assert len(released) == 3, "once for each version that was there"
    assert used == [used[0]] * 3


def noted(used: list[OwnStreams], one: Callable[[OwnStreams], Any]) -> Callable[[OwnStreams], Any]:
    def note(streams: OwnStreams) -> Any:
        used.append(streams)
        return one(streams)

    return note


def order(version: int) -> StageOrder:
    sums = xxhash.xxh3_64_intdigest(bytes([7] * BYTES))
    entry = TensorEntry(name="w", dtype="uint8", shape=(BYTES,), offset=0, nbytes=BYTES, xxh3=sums)
    return StageOrder(version, f"n{version}", "host", 1, 2, 5.0, [entry.model_dump()])


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_a_learner_read_from_the_file_is_given_back_before_it_copies_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first version that is requested comes from its file over another stream than the copies of later ones."""
    released: list[torch.device] = []
    monkeypatch.setattr(sender, "release", released.append)
    publication: Any = type("Publication", (), {"manifest": lambda self, version: manifest(version)})()
    weights = DeviceWeights(publication, CPU, BYTES, host="127.0.0.1", deadline_s=1.0)
    monkeypatch.setattr(DeviceWeights, "_from_file", lambda self, manifest: torch.zeros(BYTES, dtype=torch.uint8))
    weights._version(3)
    for version in (4, 5, 6):
        weights.keep(manifest(version), [("w", torch.zeros(BYTES, dtype=torch.uint8))])
    assert released == [CPU]


def manifest(version: int) -> Any:
    tensors = [TensorEntry.model_validate(entry) for entry in order(version).tensors]
    return type("Manifest", (), {"version": version, "total_bytes": BYTES, "tensors": tensors})()
