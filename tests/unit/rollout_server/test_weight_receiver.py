"""A manifest is a stranger's word: nothing is fetched and no memory is taken for what is not the server's model."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.published import fingerprint_of
from protocol.messages import TensorEntry, WeightManifest
from rollout_server.weights.receiver import WeightReceiver

MakeConfig = Callable[..., RunConfig]

GIB = 1 << 30
OWN = (("weight", "torch.float32", (2, 3)),)


class Engine:
    """Has a model of one small tensor."""

    architecture_fingerprint = fingerprint_of(OWN)
    loaded: tuple[str, ...] = ()
    processes = None

    async def update_weights(self, version: int, tensors: Any) -> None:
        self.loaded = tuple(name for name, _ in tensors)


def manifest(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> WeightManifest:
    entry = TensorEntry(name=name, dtype=dtype, shape=shape, offset=0, nbytes=nbytes, xxh3=0)
    return WeightManifest(version=1, publication="p", tensors=(entry,), total_bytes=nbytes)


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
def test_weights_of_another_model_stop_the_server_before_they_are_fetched(
    make_config: MakeConfig, offered: WeightManifest
) -> None:
    engine: Any = Engine()
    config = make_config()
    receiver = WeightReceiver(
        config.model.path,
        config.network,
        config.first_meeting_s,
        engine,
        "zmq",
        "tcp://127.0.0.1:9",
    )
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
