"""A channel between devices that does not work: another one takes its place, or the server says why it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.published import fingerprint_of
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Error, WeightManifest
from rollout_server.engines.arrived_weights import ThisProcess
from rollout_server.weights.receiver import WeightReceiver
from tests.plugins.device_channels.device_channel_rig import DirectSocket, LearnerHalf, some_weights
from tests.unit.rollout_server.test_weight_receiver import Engine

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[LearnerHalf]:
    half = LearnerHalf(tmp_path)
    half.publish(1, some_weights(1))
    yield half
    half.close()


class DeviceEngine(Engine):
    """Has the learner's model, and says when what has arrived is dropped."""

    def __init__(self, offered: WeightManifest):
        shapes = ((t.name, f"torch.{t.dtype}", t.shape) for t in offered.tensors)
        self.architecture_fingerprint = fingerprint_of(shapes)
        self.drops = 0
        self.processes = ThisProcess(torch.device("cpu"))
        run = self.processes.run

        async def counted(function: str, *arguments: Any) -> list[Any]:
            self.drops += function.endswith(":drop")
            return await run(function, *arguments)

        self.processes.run = counted


class Follower:
    """What a server does with versions, over `nccl` as far as it goes."""

    def __init__(self, config: RunConfig, learner: LearnerHalf, *, instead: Any):
        self.manifest = learner.publication.manifest(1)
        self.engine: Any = DeviceEngine(self.manifest)
        self.receiver = WeightReceiver(
            config.model.path,
            config.network,
            config.first_meeting_s,
            self.engine,
            "nccl",
            "tcp://127.0.0.1:9",
            instead=instead,
        )
        self.receiver.close()
        socket: Any = DirectSocket(learner)
        self.receiver._socket = socket

    def load(self) -> str:
        """The channel over which it came."""
        return asyncio.run(self.receiver.load(self.manifest)).channel

    def fail(self, told: str) -> None:
        drops = self.engine.drops
        with pytest.raises(TimeoutError, match=told):
            self.load()
        assert self.engine.drops > drops, "what has arrived takes the engine's room"
        assert self.engine.processes.own.state["device_channels"]._flat is None
        assert not self.engine.loaded


def no_room(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


async def never(*_: Any, **__: Any) -> None:
    raise TimeoutError("nccl: the learner's rank did not come")


SENDER = "asyncrl_plugins.device_channels.sender.DeviceWeights"
STAGE = "asyncrl_plugins.device_channels.stage"
REFUSAL = Error(code=ErrorCode.WRONG_CHANNEL, reason="this learner sends nothing over nccl", version=1)
AT_ONCE = [
    (
        f"{SENDER}._from_file",
        no_room,
        "finds no room on the learner's device",
    ),
    (
        "asyncrl_plugins.device_channels.stage.Stage._fill",
        no_room,
        "no room beside the engine's model: CUDA out of memory",
    ),
    (
        f"{SENDER}.answer",
        lambda *_: REFUSAL,
        "this learner sends nothing over nccl",
    ),
]
DAMAGED = (f"{STAGE}.wrong_tensors", lambda *_: ["half"], "tensors have wrong checksums")
LATE = ("asyncrl_plugins.device_channels.receiver.receive", never, "rank did not come")
breaks = partial(pytest.mark.parametrize, ("place", "broken", "told"))


@breaks(AT_ONCE)
def test_auto_goes_on_over_another_channel_at_once_where_trying_again_is_in_vain(
    make_config: MakeConfig,
    learner: LearnerHalf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    broken: Any,
    told: str,
) -> None:
    monkeypatch.setattr(place, broken)
    follower = Follower(make_config(), learner, instead="shm")
    follower.fail(told)
    assert "From now on weights come over shm" in caplog.text
    assert follower.load() == "shm"
    assert follower.engine.loaded == tuple(some_weights(1))


@breaks([DAMAGED, LATE])
def test_auto_goes_on_over_another_channel_after_three_failures_in_a_row(
    make_config: MakeConfig, learner: LearnerHalf, place: str, broken: Any, told: str
) -> None:
    follower = Follower(make_config(), learner, instead="shm")
    for failures in (2, 3):  # a success between them starts the count again
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, broken)
            for _ in range(failures):
                assert follower.receiver.channel == "nccl"
                follower.fail(told)
        assert follower.load() == ("nccl" if failures == 2 else "shm")
        follower.engine.loaded = ()


@breaks([*AT_ONCE, DAMAGED])
def test_a_channel_that_was_asked_for_and_does_not_work_stops_the_server_with_the_fix(
    make_config: MakeConfig, learner: LearnerHalf, monkeypatch: pytest.MonkeyPatch, place: str, broken: Any, told: str
) -> None:
    monkeypatch.setattr(place, broken)
    follower = Follower(make_config(), learner, instead=None)
    fix = "Set rollout.weights_channel=shm or zmq$"
    with pytest.raises(UserError, match=rf"rollout.weights_channel is nccl, but .*{told}.*\. {fix}"):
        follower.load()
    assert follower.engine.drops > 0


def test_a_channel_that_was_asked_for_is_tried_on_while_the_learner_may_come(
    make_config: MakeConfig, learner: LearnerHalf
) -> None:
    follower = Follower(make_config(), learner, instead=None)
    place, broken, told = LATE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, broken)
        for _ in range(5):
            follower.fail(told)
    assert follower.load() == "nccl"


def test_a_version_that_has_gone_is_no_failure_of_the_channel(make_config: MakeConfig, learner: LearnerHalf) -> None:
    follower = Follower(make_config(), learner, instead="shm")
    for version in (2, 3):
        learner.publish(version, some_weights(version))
    for _ in range(4):
        with pytest.raises(ProtocolError, match="version 1 is not published any more") as caught:
            follower.load()
        assert caught.value.code is ErrorCode.VERSION_GONE
    assert follower.receiver.channel == "nccl"
