"""Versions that servers send on to each other: real sockets, and senders that die, lie, stall or have gone on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.relays import relay as relay_module
from asyncrl_plugins.relays.relay import Relay
from protocol.curve import read_server_keys
from protocol.download import CHUNK_BYTES
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    Chunk,
    ChunkRequest,
    Error,
    Source,
)
from protocol.sockets import ServerSocket
from tests.plugins.relays.weight_fleet import Learner, Server, contents, fleet
from tests.rigs.curve_keys import make_keys

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    made = Learner(tmp_path)
    yield made
    made.close()


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config(network={"timeout_s": 6.0})


def test_a_version_travels_along_a_chain_while_it_arrives(config: RunConfig, learner: Learner) -> None:
    """When the first server has the version, the second has sent on a part of it: nobody waits for whole versions."""
    manifest = learner.publish(1)
    learner.pause_s = 0.1
    sent_on: list[int] = []

    async def run() -> None:
        async with fleet(config, learner, 3) as servers:
            by_name = {server.name: server for server in servers}
            behind = {"s1": "s0", "s2": "s1"}
            learner.choose = lambda request: (
                by_name[behind[request.session]].source(1) if request.session in behind else None
            )

            async def get(server: Server) -> None:
                assert await server.get(manifest) == contents(learner, 1)
                if server.name == "s0":
                    sent_on.append(servers[1].puller.sent_bytes)

            async with asyncio.TaskGroup() as tasks:
                for server in servers:
                    tasks.create_task(get(server))
                    await asyncio.sleep(0.15)  # the one before listens
            assert servers[0].puller.sent_bytes == servers[1].puller.sent_bytes == manifest.total_bytes
            assert servers[2].puller.received_bytes == {"learner": 0, "server": manifest.total_bytes}

    asyncio.run(run())
    assert learner.sent_bytes == manifest.total_bytes, "to one server"
    assert sent_on[0] >= CHUNK_BYTES


def lie(download: Any) -> None:
    """Let a server send other bytes than it has verified."""
    read = download.read

    def lying(offset: int, nbytes: int) -> memoryview | None:
        data = read(offset, nbytes)
        return data if data is None else memoryview(bytes(b ^ 1 for b in data[:1]) + bytes(data[1:]))

    download.read = lying


@pytest.mark.parametrize("how", ["lies", "dies", "stalls", "another_model", "moved_on", "not_there"])
def test_a_source_that_fails_is_named_and_another_one_goes_on_where_it_ended(
    config: RunConfig, learner: Learner, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = learner.publish(1)
    reasons = {"lies": "checksum", "another_model": "checksum", "moved_on": "gone"}
    reason = reasons.get(how, "silent")
    short = config.model_copy(update={"network": config.network.model_copy(update={"timeout_s": 2.0})})

    async def run() -> tuple[bytes, Server, int]:
        async with fleet(short if how == "stalls" else config, learner, 2) as (first, second):
            assert await first.get(manifest) == contents(learner, 1)
            relay, before = first.puller._relay, learner.sent_bytes
            assert relay is not None
            source = first.source(1)
            learner.choose = lambda request: source if request.failure is None else None
            if how == "lies":
                lie(relay._offers[0])
            elif how == "another_model":
                relay._offers[0]._target[:] = bytes(manifest.total_bytes)
            elif how == "moved_on":
                relay._offers.clear()
            elif how == "not_there":
                relay.close()
                relay.close = lambda: None
            else:
                answered: list[int] = []
                read = relay._read

                def some_only(request: ChunkRequest) -> Chunk | None:
                    answered.append(request.offset)
                    if len(answered) <= 2:
                        return read(request)
                    if how == "stalls":
                        return None  # for ever: its own source has
                    relay._task.cancel()
                    relay._work = lambda: None
                    relay._waiting.clear()
                    raise asyncio.CancelledError

                monkeypatch.setattr(relay, "_read", some_only)
            return await second.get(manifest), second, learner.sent_bytes - before

    data, second, again = asyncio.run(run())
    assert data == contents(learner, 1)
    assert second.puller.failures == {reason: 1}
    (failure,) = [request.failure for request in learner.asked if request.failure]
    assert failure.server_id == "s0"
    assert failure.reason == reason
    if how in ("dies", "stalls"):
        assert again < manifest.total_bytes, "what had arrived stays"


def test_a_version_that_is_overtaken_is_sent_to_its_end_and_then_forgotten(
    config: RunConfig, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = [learner.publish(number) for number in (1, 2)]
    monkeypatch.setattr(relay_module, "KEPT_S", 2.0)
    monkeypatch.setattr(relay_module, "LOOK_EVERY_S", 0.1)

    async def run() -> None:
        async with fleet(config, learner, 2) as (first, second):
            await first.get(manifests[0])
            source = first.source(1)
            await first.get(manifests[1])
            learner.choose = lambda request: source if request.failure is None else None
            assert await second.get(manifests[0]) == contents(learner, 1)
            assert not second.puller.failures
            await asyncio.sleep(2.5)
            assert first.puller._relay is not None
            assert [download.manifest.version for download in first.puller._relay._offers] == [2]

    asyncio.run(run())


def test_a_version_that_the_learner_has_dropped_ends_the_transfer_for_all_behind(
    config: RunConfig, learner: Learner
) -> None:
    old = learner.publish(1)

    async def run() -> None:
        async with fleet(config, learner, 2) as (first, second):
            learner.choose = lambda request: (
                Error(code=ErrorCode.VERSION_GONE, reason="version 1 is gone", version=1)
                if request.failure
                else first.source(1)
                if request.session == "s1"
                else None
            )
            learner.pause_s = 0.2
            ends = [asyncio.create_task(first.get(old))]
            await asyncio.sleep(0.3)
            ends.append(asyncio.create_task(second.get(old)))
            await asyncio.sleep(0.3)
            learner.publish(2)
            learner.publish(3)
            for problem in await asyncio.gather(*ends, return_exceptions=True):
                assert isinstance(problem, ProtocolError), problem
                assert problem.code is ErrorCode.VERSION_GONE
            learner.pause_s = 0.0
            learner.choose = lambda request: None
            newest = learner.publication.manifest(3)
            assert await first.get(newest) == contents(learner, 3)

    asyncio.run(run())


def test_a_learner_that_knows_no_sources_sends_all_itself(config: RunConfig, learner: Learner) -> None:
    manifest = learner.publish(1)
    learner.choose = lambda request: Error(code=ErrorCode.WRONG_CHANNEL, reason="this learner sends all weights itself")

    async def run() -> None:
        async with fleet(config, learner, 1) as (server,):
            for _ in range(2):
                assert await server.get(manifest) == contents(learner, 1)

    asyncio.run(run())
    assert len(learner.asked) == 1


def test_with_keys_only_servers_that_the_learner_has_named_can_fetch(
    make_config: MakeConfig, learner: Learner, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    config = make_config(network={"keys_dir": str(tmp_path / "keys"), "timeout_s": 4.0})
    known = zmq.curve_public(read_server_keys(tmp_path / "keys").secret).decode()
    manifest = learner.publish(1)

    async def run(peer_keys: tuple[str, ...]) -> dict[str, int]:
        async with fleet(config, learner, 2) as (first, second):
            learner.choose = lambda request: (
                Source(version=1, peer_keys=peer_keys)
                if request.session == "s0" or request.failure
                else first.source(1)
            )
            for server in (first, second):
                assert await server.get(manifest) == contents(learner, 1)
            return second.puller.failures

    assert asyncio.run(run((known,))) == {}
    assert learner.asked[0].key == known
    assert asyncio.run(run(())) == {"silent": 1}


def test_a_relay_refuses_what_it_should_not_send(config: RunConfig, learner: Learner) -> None:
    manifest = learner.publish(1)

    async def run() -> list[str]:
        async with fleet(config, learner, 1) as (server,):
            await server.get(manifest)
            reader = ServerSocket(server.source(1).endpoint, (Chunk, Error), linger_s=0)
            codes = []
            for fields in ({"version": 2}, {"publication": "x"}, {"offset": 1 << 40}, {"nbytes": 5 << 20}, {}):
                request = {"version": 1, "publication": manifest.publication, "offset": 0, "nbytes": 100, **fields}
                await reader.send(ChunkRequest(**request), timeout_s=2.0)
                answer = await reader.recv(2.0)
                codes.append(str(answer.code) if isinstance(answer, Error) else type(answer).__name__)
            reader.close()
            return codes

    assert asyncio.run(run()) == ["version_gone", "version_gone", "malformed", "too_large", "Chunk"]


def test_a_relay_listens_where_the_learner_is_reached(config: RunConfig) -> None:
    async def run() -> str:
        relay = Relay(config.network)
        relay.close()
        return relay.endpoint

    assert asyncio.run(run()).startswith("tcp://127.0.0.1:")
