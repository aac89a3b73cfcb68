"""A manifest is a stranger's word: nothing is fetched and no memory is taken for what is not the server's model."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.loading import fingerprint_of
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import TensorEntry, WeightManifest
from rollout_server.staging import LocalStaging
from rollout_server.weights import WeightReceiver

GIB = 1 << 30
OWN = (("weight", "torch.float32", (2, 3)),)


class Engine:
    """Has a model of one small tensor."""

    architecture_fingerprint = fingerprint_of(OWN)
    loaded: tuple[str, ...] = ()

    async def update_weights(self, version: int, tensors: Any) -> None:
        self.loaded = tuple(name for name, _ in tensors)


def manifest(name: str, dtype: str, shape: tuple[int, ...], nbytes: int, total: int | None = None) -> WeightManifest:
    entry = TensorEntry(name=name, dtype=dtype, shape=shape, offset=0, nbytes=nbytes, xxh3=0)
    return WeightManifest(version=1, tensors=(entry,), total_bytes=nbytes if total is None else total)


@pytest.mark.parametrize(
    "offered",
    [
        manifest("weight", "float32", (64, GIB), 256 * GIB),
        manifest("other", "float32", (2, 3), 24),
        manifest("weight", "int32", (2, 3), 24),
        manifest("weight", "float32", (3, 2), 24),
    ],
    ids=["size", "name", "dtype", "shape"],
)
@pytest.mark.parametrize("channel", ["shm", "zmq"])
def test_weights_of_another_model_stop_the_server_before_they_are_fetched(
    make_config: Callable[..., RunConfig], offered: WeightManifest, channel: Any
) -> None:
    engine: Any = Engine()
    receiver = WeightReceiver(make_config(), engine, channel, "tcp://127.0.0.1:9")
    tracemalloc.start()
    try:
        with pytest.raises(
            BadStateError, match=r"the learner publishes 1 tensors of .* not those of this server's model"
        ):
            asyncio.run(receiver.load(offered))
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
        receiver.close()
    assert engine.loaded == ()


def test_a_manifest_that_contradicts_itself_is_malformed(make_config: Callable[..., RunConfig]) -> None:
    engine: Any = Engine()
    receiver = WeightReceiver(make_config(), engine, "shm", "tcp://127.0.0.1:9")
    with pytest.raises(ProtocolError, match="differ from the layout") as caught:
        asyncio.run(receiver.load(manifest("weight", "float32", (2, 3), 24, total=256 * GIB)))
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.parametrize("instead", ["zmq", None])
def test_transfers_between_devices_that_fail_again_and_again_give_way_to_another_channel(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    instead: Any,
) -> None:
    """Unless that channel was asked for."""

    async def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError("nccl: the learner's rank did not come")

    monkeypatch.setattr("rollout_server.weights.receive", fail)
    engine: Any = Engine()
    engine.staging = LocalStaging(torch.device("cpu"))
    receiver = WeightReceiver(make_config(), engine, "nccl", "tcp://127.0.0.1:9", instead=instead)
    channels = []
    for _ in range(3):
        channels.append(receiver.channel)
        with pytest.raises(TimeoutError, match="rank did not come"):
            asyncio.run(receiver.load(manifest("weight", "float32", (2, 3), 24)))
    receiver.close()
    assert channels == ["nccl"] * 3
    assert receiver.channel == (instead or "nccl")
    assert ("From now on weights come over zmq" in caplog.text) == bool(instead)
