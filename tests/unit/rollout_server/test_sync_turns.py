"""Turns of the device: each side's reactions to grants, recalls and returns, the late ones above all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.telemetry.timeline import Timeline
from learner.network.device_lease import LearnerLease, LeaseGrants, take_first_lease
from learner.network.servers import ModelFacts, Servers, ServerState
from learner.service import Learner
from learner.training.engine import TorchEngine
from protocol.device_lock import LEASE_FILE, DeviceLease
from protocol.endpoints import host_id
from protocol.errors import ErrorCode
from protocol.messages import (
    Error,
    Hello,
    LeaseGrant,
    LeaseRecall,
    LeaseReturn,
    Refusal,
    Welcome,
)
from rollout_server.engines.base import EngineUsage
from rollout_server.exporter import ServerExporter
from rollout_server.shared_device import SharedDevice
from tests.rigs.fuzz import content
from tests.rigs.unconnected import Ledger, Ports

MakeConfig = Callable[..., RunConfig]


def returned(fence: int) -> LeaseReturn:
    return LeaseReturn(fence=fence, wake_s=0.1, sleep_s=0.2, sleep_bytes=3)


# --- the learner's side -------------------------------------------------------------------------------


@pytest.fixture
def ports() -> Ports:
    return Ports()


@pytest.fixture
def servers(make_config: MakeConfig, ports: Ports) -> Servers:
    config = make_config(trainer={"mode": "sync"}, network={"weights_port": 1})
    ledger: Any = Ledger()
    learner_ports: Any = ports
    facts = ModelFacts(content.MODEL, content.PROCESSOR, 9)
    return Servers(
        config.network, config.trainer.mode, config.rollout.quantization, "run", learner_ports, ledger, facts
    )


def hello(name: str, pid: int, mode: str = "sync") -> Hello:
    return content.hello(name).model_copy(update={"pid": pid, "mode": mode, "host_id": host_id()})


def leases(ports: Ports) -> list[tuple[bytes, str, int]]:
    """Sent since the last call."""
    sent = [(i, type(m).__name__, m.fence) for i, m in ports.sent if isinstance(m, LeaseGrant | LeaseRecall)]
    ports.sent.clear()
    return sent


def test_a_grant_goes_to_whoever_is_there_and_each_has_a_number_of_its_own(servers: Servers, ports: Ports) -> None:
    grants = LeaseGrants(servers)
    grants.lend(2)
    grants.offer()
    assert leases(ports) == [], "nobody is there"
    servers.connected["a"] = ServerState(content.hello("a"), b"a")
    grants.offer()
    grants.offer()
    assert leases(ports) == [(b"a", "LeaseGrant", 2)]
    servers.connected = {"b": ServerState(content.hello("b"), b"b")}
    grants.offer()
    assert leases(ports) == [(b"b", "LeaseGrant", 3)], "a's number is not given twice"
    servers.connected = {"b": ServerState(content.hello("b"), b"b")}
    grants.offer()
    assert leases(ports) == [(b"b", "LeaseGrant", 4)], "after a reconnection nobody knows what had arrived"
    grants.recall()
    grants.offer()
    assert leases(ports) == [(b"b", "LeaseRecall", 4)]
    grants.lend(3)
    grants.offer()
    assert leases(ports) == [(b"b", "LeaseGrant", 5)], "numbers never fall"


def test_a_return_under_an_old_fence_is_refused_and_counted(servers: Servers, ports: Ports) -> None:
    grants = LeaseGrants(servers)
    server = servers.connected["a"] = ServerState(content.hello("a"), b"a")
    for fence in (1, 7):
        grants.take_return(server, returned(fence))
    grants.lend(2)
    grants.offer()
    ports.sent.clear()
    grants.take_return(server, returned(1))
    assert grants.returned is None
    assert servers.errors == {ErrorCode.STALE_FENCE: 3}
    assert [m.code for _, m in ports.sent] == [ErrorCode.STALE_FENCE]
    grants.take_return(server, returned(2))
    assert grants.returned == returned(2)
    ports.sent.clear()
    grants.offer()
    assert leases(ports) == [(b"a", "LeaseGrant", 3)], "nobody had asked for it: while we sleep, it is granted again"


def test_one_device_one_server(servers: Servers, ports: Ports) -> None:
    servers.greet(b"x", hello("asynchronous", os.getpid(), mode="async"))
    servers.greet(b"a", hello("a", os.getpid()))
    servers.greet(b"b", hello("b", os.getpid()))
    refused, welcomed, second = [message for _, message in ports.sent]
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.fix) == (ErrorCode.MODE_MISMATCH, "Start both with the same trainer.mode")
    assert isinstance(welcomed, Welcome)
    assert isinstance(second, Refusal)
    assert "in sync mode the learner shares its device with one, which is 'a'" in second.reason


def test_the_successor_of_a_dead_server_is_welcome_at_once(servers: Servers, ports: Ports) -> None:
    gone = 2**22 + 1  # above the largest process id
    servers.greet(b"a", hello("a", gone))
    servers.greet(b"b", hello("b", os.getpid()))
    assert list(servers.connected) == ["b"]


def test_the_learner_sleeps_before_it_lends_and_wakes_after_it_has_the_device(make_config: MakeConfig) -> None:
    config = make_config(trainer={"mode": "sync"}, learner={"wait_timeout_s": 0.3})
    both: Any = Mock(**{"sleep.return_value": 42}, returned=None)
    lease, timeline = (
        take_first_lease(
            config.run_path, timeout_s=config.network.timeout_s, wait_timeout_s=config.learner.wait_timeout_s
        ),
        Timeline(),
    )
    turns = LearnerLease(
        config.learner.wait_timeout_s, lease, both, both, lambda method, *args: method(*args), timeline
    )
    turns.take_back(lambda: None)
    assert both.mock_calls == [], "it is ours"
    turns.lend()
    turns.lend()
    assert both.mock_calls == [call.sleep(), call.lend(2)]
    server = DeviceLease(config.run_path, "rollout_server")
    assert server.try_take(2)
    with pytest.raises(BadStateError, match=r"learner waited 0.3 s .*: rollout_server \(pid \d+, fence 2"):
        turns.take_back(lambda: None)
    server.give_up()
    turns.take_back(lambda: None)
    assert both.mock_calls == [call.sleep(), call.lend(2), call.recall(), call.recall(), call.wake()]
    assert [(span["who"], span["what"]) for span in timeline.take()] == [("learner", "asleep")]
    report = turns.report()
    assert (report["lease_fence"], report["sleep_bytes/learner"]) == (3, 42)
    assert report["asleep_s/learner"] > 0.3
    assert turns.report()["asleep_s/learner"] == 0.0, "of each step its own"


# --- the server's side --------------------------------------------------------------------------------


class Server:
    """A shared device with nothing real around it but the lease."""

    def __init__(self, config: RunConfig):
        self.engine: Any = AsyncMock(usage=EngineUsage(0, 0.0, 0, sleep_bytes=7))
        self.link: Any = AsyncMock(learner_is_silent=False)
        self.exporter = Mock(ServerExporter)
        self.device = SharedDevice(
            config.run_path,
            self.engine,
            self.link,
            self.exporter,
            wait_timeout_s=config.learner.wait_timeout_s,
            heartbeat_s=config.network.heartbeat_s,
        )
        self.learner = DeviceLease(config.run_path, "learner")

    async def until(self, satisfied: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not satisfied():
                await asyncio.sleep(0.005)

    @property
    def told(self) -> list[str]:
        """The engine's calls."""
        return [name for name, _, _ in self.engine.mock_calls]

    @property
    def sent(self) -> list[Any]:
        return [each.args[0] for each in self.link.send.mock_calls]

    @property
    def returns(self) -> list[int]:
        return [message.fence for message in self.sent if isinstance(message, LeaseReturn)]

    @property
    def stale(self) -> int:
        return self.exporter.stale_fence.call_count


def play(config: RunConfig, scene: Callable[[Server], Any]) -> None:
    async def scenario() -> None:
        server = Server(config)
        turns = asyncio.create_task(server.device.follow_grants())
        try:
            await scene(server)
        finally:
            turns.cancel()
            if turns.done() and not turns.cancelled():
                turns.result()

    asyncio.run(scenario())


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config(trainer={"mode": "sync"}, network={"heartbeat_s": 0.05}, learner={"wait_timeout_s": 0.5})


def test_a_turn_begins_with_the_grant_and_ends_when_the_work_is_done(config: RunConfig) -> None:
    async def scene(server: Server) -> None:
        device = server.device
        working = asyncio.Event()
        finish = asyncio.Event()

        async def work() -> None:
            async with device.in_use():
                working.set()
                await finish.wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0.05)
        assert server.told == [], "no model without a turn"
        assert device.grant(1) is None
        await working.wait()
        assert not server.learner.try_take()
        assert device.recall(1) is None
        await asyncio.sleep(0.1)
        assert server.told == ["start"], "what is generated is finished first"
        late = asyncio.create_task(work())
        finish.set()
        await task
        await server.until(lambda: server.returns == [1])
        assert not late.done(), "what comes after the recall waits for the next turn"
        assert server.learner.try_take()
        assert device.grant(3) is None
        await asyncio.sleep(0.05)
        assert server.told == ["start", "sleep"], "the lease decides, not the message"
        server.learner.give_up()
        await late
        assert server.told == ["start", "sleep", "wake"]

    play(config, scene)


def test_messages_that_were_overtaken_are_refused_and_counted(config: RunConfig) -> None:
    async def scene(server: Server) -> None:
        device = server.device
        device.grant(4)
        await server.until(lambda: server.told == ["start"])
        assert isinstance(device.recall(3), Error)
        assert isinstance(device.grant(4), Error)
        await asyncio.sleep(0.1)
        assert server.told == ["start"], "it still has its turn"
        assert device.recall(6) is None, "a newer recall ends the older turn, too"
        await server.until(lambda: server.returns == [4])
        assert isinstance(device.grant(6), Error), "it was recalled before it came"
        assert server.learner.try_take(9)
        server.learner.give_up()
        assert device.grant(8) is None, "the server cannot know"
        await server.until(lambda: server.stale == 4)
        assert server.told == ["start", "sleep"]
        assert server.sent[-1].code is ErrorCode.STALE_FENCE
        assert device.grant(10) is None
        await server.until(lambda: server.told[-1] == "wake")

    play(config, scene)


def test_a_granted_device_that_stays_taken_is_an_error_with_the_holders_name(config: RunConfig) -> None:
    async def scene(server: Server) -> None:
        assert server.learner.try_take()
        server.device.grant(2)
        await asyncio.sleep(1.0)

    with pytest.raises(BadStateError, match=r"rollout_server waited 0.5 s .*: learner \(pid \d+, fence 1\) has had it"):
        play(config, scene)


# --- configuration ------------------------------------------------------------------------------------


def test_sync_mode_is_on_policy_unless_somebody_says_otherwise(make_config: MakeConfig) -> None:
    values = make_config().model_dump()
    values["trainer"]["mode"] = "sync"
    del values["learner"]["max_staleness"]
    assert RunConfig.model_validate(values).learner.max_staleness == 0
    del values["learner"]
    assert RunConfig.model_validate(values).learner.max_staleness == 0
    values["trainer"]["mode"] = "async"
    assert RunConfig.model_validate(values).learner.max_staleness == 2


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"learner": {"max_staleness": 2}}, "Set learner.max_staleness=0, or change trainer.mode"),
        ({"rollout": {"servers": 2}}, "Set rollout.servers=1"),
        ({"rollout": {"device": "cuda:1"}}, "learner.device is auto and rollout.device is cuda:1"),
        ({"rollout": {"tensor_parallel_size": 2}}, "Set rollout.tensor_parallel_size=1"),
    ],
)
def test_what_contradicts_sync_mode_is_refused_with_the_fix(
    make_config: MakeConfig, sections: dict[str, dict[str, Any]], told: str
) -> None:
    with pytest.raises(ValueError, match=r"trainer\.mode is sync") as caught:
        make_config(trainer={"mode": "sync"}, **sections)
    assert told in str(caught.value)


def test_a_learner_that_could_not_start_leaves_no_run_directory(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(engine: TorchEngine) -> None:
        assert (Path(config.run_dir) / LEASE_FILE).exists(), "it has the device before it touches it"
        raise UserError("no such weights")

    config = make_config(trainer={"mode": "sync"})
    monkeypatch.setattr(TorchEngine, "prepare", prepare)
    with pytest.raises(UserError, match="no such weights"):
        Learner(config)
    assert not Path(config.run_dir).exists()
