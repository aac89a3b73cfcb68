"""Versions that come as differences from the one before: equal bytes, and plain ones where a difference will not do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl.config.schema import RunConfig
from protocol.curve import make_keys, read_server_keys
from protocol.download import CHUNK_BYTES
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Chunk, Error, Source
from protocol.weight_deltas import MOST_SHARE, pack, unpack
from protocol.weights import Tensor
from tests.rigs.weight_fleet import Learner, Server, contents, fleet

MakeConfig = Callable[..., RunConfig]
SIZES = (CHUNK_BYTES * 3 // 2, 100, 0, CHUNK_BYTES, CHUNK_BYTES // 2 + 6)


def trained(number: int, share: float = 0.01) -> list[Tensor]:
    """bfloat16 tensors; from one version to the next a share of the elements changes, and the last tensor wholly."""
    random, tensors = np.random.default_rng(0), []
    for index, size in enumerate(SIZES):
        values = random.integers(0, 1 << 16, size // 2, np.uint16)
        for step in range(number):
            changes = np.random.default_rng([step, index])
            everything = index == len(SIZES) - 1
            changed = changes.random(values.size) < (1.0 if everything else share)
            values ^= (changes.integers(1, 1 << 16 if everything else 4, values.size) * changed).astype(np.uint16)
        tensors.append(Tensor(f"w{index}", "bfloat16", (values.size,), memoryview(values.tobytes())))
    return tensors


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    made = Learner(tmp_path)
    yield made
    made.close()


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config(network={"timeout_s": 6.0, "weights_compression": "delta"})


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 7, 4096])
def test_a_difference_gives_the_new_bytes(width: int, size: int) -> None:
    old = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    new = old.copy()
    new[size // 2] ^= 3
    packed = pack(old.data, new.data, width)
    if size < 100:
        assert packed is None, "the frame is larger than its bytes"
        return
    assert packed is not None
    into = bytearray(size)
    unpack(memoryview(packed), old.data, memoryview(into), width)
    assert bytes(into) == new.tobytes()
    noise = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    assert pack(old.data, noise.data, width) is None


def test_what_is_no_difference_of_so_many_bytes_is_refused() -> None:
    old, size = memoryview(bytes(1 << 20)), 1 << 20
    for told, packed in {
        "limit": bytes(int(MOST_SHARE * size) + 1),
        "not a zstd frame of 1,048,576 bytes": b"nonsense",
        "too small": pack(memoryview(bytes(64 * size)), memoryview(bytes(64 * size)), 1),
        "Corrupt": pack(memoryview(bytes(size - 1)), memoryview(bytes(size - 1)), 1),
    }.items():
        assert packed is not None
        with pytest.raises(ProtocolError, match=told) as refused:
            unpack(memoryview(packed), old, memoryview(bytearray(size)), 1)
        assert refused.value.code is ErrorCode.MALFORMED


def test_the_next_version_comes_as_a_difference_and_is_the_same_bytes(config: RunConfig, learner: Learner) -> None:
    """A tensor that changes wholly comes plain; so does all of it to a server that comes later, or missed a version."""

    async def run() -> None:
        async with fleet(config, learner, 2) as (server, later):
            first = learner.publish(1, trained(1))
            assert await server.get(first) == contents(learner, 1)
            assert server.sources.saved_bytes == 0
            before = learner.sent_bytes
            second = learner.publish(2, trained(2))
            assert await server.get(second) == contents(learner, 2)
            sent = learner.sent_bytes - before
            assert sent + server.sources.saved_bytes == second.total_bytes
            assert CHUNK_BYTES // 2 < sent < 0.5 * second.total_bytes
            assert await later.get(second) == contents(learner, 2)
            assert later.sources.saved_bytes == 0
            for number in (3, 4):
                learner.publish(number, trained(number))
            saved, newest = server.sources.saved_bytes, learner.publish(5, trained(5))
            assert await server.get(newest) == contents(learner, 5)
            assert server.sources.saved_bytes == saved, "version 2 is published no more"

    asyncio.run(run())


def test_a_difference_is_computed_once_for_all(
    config: RunConfig, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []

    def count(old: memoryview, new: memoryview, width: int) -> bytes | None:
        packed.append(new.nbytes)
        return pack(old, new, width)

    monkeypatch.setattr("learner.network.weight_deltas.pack", count)

    async def run() -> None:
        async with fleet(config, learner, 3) as servers:
            for number in (1, 2):
                manifest = learner.publish(number, trained(number))
                for data in await asyncio.gather(*(server.get(manifest) for server in servers)):
                    assert data == contents(learner, number)
            assert sum(packed) == manifest.total_bytes

    asyncio.run(run())


@pytest.mark.parametrize("how", ["other_bits", "nonsense"])
def test_a_damaged_difference_from_the_learner_is_mended_with_plain_bytes(
    config: RunConfig, learner: Learner, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = learner.publish(1, trained(1)), learner.publish(2, trained(2))
    wrong = {
        "nonsense": b"nonsense",
        "other_bits": pack(memoryview(bytes(CHUNK_BYTES)), memoryview(bytes(CHUNK_BYTES - 1) + b"1"), 2),
    }[how]
    assert wrong is not None
    damaged: list[int] = []

    def spoil(answer: Chunk | Error) -> Chunk | Error:
        if not isinstance(answer, Chunk) or answer.base is None or damaged:
            return answer
        damaged.append(answer.offset)
        return answer.model_copy(update={"data": memoryview(wrong)})

    async def run() -> None:
        async with fleet(config, learner, 1) as (server,):
            await server.get(first)
            learner.spoil = spoil
            assert await server.get(second) == contents(learner, 2)

    asyncio.run(run())
    assert damaged
    assert ("not a zstd frame" if how == "nonsense" else "wrong checksum") in caplog.text


def test_servers_pass_differences_on(config: RunConfig, learner: Learner) -> None:
    """Along a chain, to one that has the same version before, while one without it gets plain bytes from the same."""

    async def run() -> None:
        async with fleet(config, learner, 3) as (first, second, late):
            behind = {"s1": first, "s2": first}
            learner.choose = lambda request: (
                behind[request.session].source(request.version) if request.session in behind else None
            )
            for number in (1, 2):
                manifest = learner.publish(number, trained(number))
                for server in (first, second):
                    assert await server.get(manifest) == contents(learner, number)
            assert second.sources.saved_bytes == first.sources.saved_bytes > 0.5 * manifest.total_bytes
            assert second.sources.received_bytes["learner"] == 0
            before = first.sources.sent_bytes
            assert await late.get(manifest) == contents(learner, 2)
            assert first.sources.sent_bytes - before == manifest.total_bytes
        assert [request.base for request in learner.asked] == [None, None, 1, 1, None]

    asyncio.run(run())


@pytest.mark.parametrize("who", ["source", "own_memory"])
def test_wrong_bytes_are_blamed_on_whoever_has_them(
    config: RunConfig, learner: Learner, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    first_manifest = learner.publish(1, trained(1))

    async def run() -> dict[str, int]:
        async with fleet(config, learner, 2) as (first, second):
            for server in (first, second):
                await server.get(first_manifest)
            manifest = learner.publish(2, trained(2))
            await first.get(manifest)
            learner.choose = lambda request: None if request.failure else first.source(2)
            relay = first.sources._relay
            assert relay is not None
            if who == "source":
                differences = relay._offers[0]._differences
                wrong = pack(memoryview(bytes(CHUNK_BYTES)), memoryview(bytes(CHUNK_BYTES - 1) + b"1"), 2)
                assert wrong is not None
                differences[0] = wrong
            else:
                assert second.sources._base is not None
                second.sources._base._target[0] ^= 1
            assert await second.get(manifest) == contents(learner, 2)
            third = learner.publish(3, trained(3))
            learner.choose = lambda request: None
            saved = second.sources.saved_bytes
            assert await second.get(third) == contents(learner, 3)
            assert second.sources.saved_bytes > saved, "the next one comes as a difference again"
            return second.sources.failures

    assert asyncio.run(run()) == ({"checksum": 1} if who == "source" else {})
    assert ("has changed in this server's memory" in caplog.text) == (who == "own_memory")


def test_a_learner_that_comes_back_is_asked_for_plain_bytes(config: RunConfig, tmp_path: Path) -> None:
    """It publishes under another id: the versions before have the same numbers, and perhaps other bits."""

    async def run() -> None:
        ended, back = Learner(tmp_path), Learner(tmp_path)
        try:
            server = Server(config, ended, "s0")
            await server.get(ended.publish(1, trained(1)))
            server._socket.close()
            again = Server(config, back, "s0")
            again.sources.close()
            again.sources = server.sources
            for number in (1, 2):
                manifest = back.publish(number, trained(number))
                assert await again.get(manifest) == contents(back, number)
            bases = [(request.version, request.base) for request in back.requests]
            assert {base for version, base in bases if version == 1} == {None}
            assert 1 in {base for version, base in bases if version == 2}
            again.close()
        finally:
            ended.close()
            back.close()

    asyncio.run(run())


def test_with_keys(make_config: MakeConfig, learner: Learner, tmp_path: Path) -> None:
    """Between servers, whose sockets speak CURVE; the learner's in test_curve_end_to_end.py."""
    make_keys(tmp_path / "keys")
    network = {"keys_dir": str(tmp_path / "keys"), "timeout_s": 6.0, "weights_compression": "delta"}
    known = zmq.curve_public(read_server_keys(tmp_path / "keys").secret).decode()

    async def run() -> None:
        async with fleet(make_config(network=network), learner, 2) as (first, second):
            learner.choose = lambda request: (
                Source(version=request.version, peer_keys=(known,))
                if request.session == "s0" or request.failure
                else first.source(request.version)
            )
            for number in (1, 2):
                manifest = learner.publish(number, trained(number))
                for server in (first, second):
                    assert await server.get(manifest) == contents(learner, number)
            assert second.sources.saved_bytes > 0
            assert second.sources.received_bytes["learner"] == 0

    asyncio.run(run())


def test_without_the_setting_no_version_is_kept(make_config: MakeConfig, learner: Learner) -> None:
    async def run() -> Any:
        async with fleet(make_config(network={"weights_fan_out": 0}), learner, 1) as (server,):
            for number in (1, 2):
                await server.get(learner.publish(number, trained(number)))
            return server.sources._base, server.sources.saved_bytes

    assert asyncio.run(run()) == (None, 0)
    assert {request.base for request in learner.requests} == {None}
