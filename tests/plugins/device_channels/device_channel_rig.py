"""The learner's half of a device channel in this process, on the CPU: `DeviceWeights` behind a socket that is none."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.models.published import tensor_bytes
from asyncrl_plugins.device_channels.sender import DeviceWeights
from asyncrl_plugins.device_channels.stage import Stage, StageOrder
from protocol.codec import Limits, decode, encode
from protocol.messages import Message, TransferEnd, TransferRequest, TransferStart, WeightManifest, Wire
from protocol.weights import Publication, Tensor
from tests.rigs.prefork import Service, fork_module

CPU = torch.device("cpu")
Weights = Mapping[str, torch.Tensor]


class LearnerHalf:
    def __init__(self, folder: Path, device: torch.device = CPU, *, deadline_s: float = 60.0):
        self.publication = Publication("device-channels", folder)
        self.device_weights = DeviceWeights(self.publication, device, 0, host="127.0.0.1", deadline_s=deadline_s)

    def publish(self, version: int, weights: Weights) -> WeightManifest:
        """As learner.publication does."""
        manifest = self.publication.publish(version, as_published(weights))
        self.device_weights.keep(manifest, weights.items())
        return manifest

    def close(self) -> None:
        self.device_weights.close()
        self.publication.close()


class DirectSocket:
    """What a server's socket to the weights endpoint does, and how the network thread answers, without a network."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self, half: LearnerHalf, identity: bytes = b"server"):
        self._half = half
        self._identity = identity
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self.begun: list[str] = []
        self.ended: list[str] = []

    async def send(self, message: Wire, timeout_s: float) -> None:
        arrived = decode(encode(message), (TransferRequest, TransferEnd), Limits())
        if isinstance(arrived, TransferEnd):
            self.ended.append(arrived.nonce)
            self._half.device_weights.end(self._identity, arrived)
        elif isinstance(arrived, TransferRequest):
            answer = self._half.device_weights.answer(self._identity, arrived)
            if isinstance(answer, TransferStart):
                self.begun.append(answer.nonce)
            self._answers.put_nowait(answer)

    def close(self) -> None:
        pass

    async def recv(self, timeout_s: float) -> Message | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answers.get()
        except TimeoutError:
            return None


def as_published(weights: Weights) -> Iterable[Tensor]:
    for name, tensor in weights.items():
        yield Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), [tensor_bytes(tensor)])


def some_weights(seed: int, megabytes: int = 0) -> dict[str, torch.Tensor]:
    """Weights of several dtypes, with offsets that need padding, an empty tensor and a scalar."""
    random = torch.Generator().manual_seed(seed)
    weights = {
        "half": torch.randn(7, 5, generator=random).bfloat16(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(seed)),
        "counts": torch.arange(9) + seed,
    }
    if megabytes:
        weights["large"] = torch.randint(0, 255, (megabytes << 20,), generator=random, dtype=torch.uint8)
    return weights


def order_of(manifest: WeightManifest, port: int, nonce: str, deadline_s: float = 60.0) -> dict[str, Any]:
    """The order for one receiver beside the learner."""
    tensors = [tensor.model_dump() for tensor in manifest.tensors]
    return {
        "version": manifest.version,
        "nonce": nonce,
        "host": "127.0.0.1",
        "port": port,
        "size": 2,
        "deadline_s": deadline_s,
        "tensors": tensors,
    }


def receive(folder: Path, device: torch.device) -> str | int:
    """Receive a version as `start` and `order` in the folder say; returns a problem or 0."""
    start = decode([(folder / "start").read_bytes()], (TransferStart,), Limits())
    assert isinstance(start, TransferStart)
    order = json.loads((folder / "order").read_text())
    stage = Stage(device)
    stage.begin(StageOrder(**order, memory=start.memory.model_dump() if start.memory else {}), rank=1)
    while not (stage.arrival.is_done or stage.arrival.problem):
        time.sleep(0.01)
    if stage.arrival.is_done:
        assert all(tensor.device.type == device.type for _, tensor in stage.tensors())
    return stage.arrival.problem or 0


def start_receiver(manifest: WeightManifest, start: TransferStart, folder: Path, *, device: str = "cpu") -> Service:
    """A process that ends well exactly when it has the version, with the right checksums."""
    own = folder / start.nonce
    own.mkdir()
    (own / "start").write_bytes(b"".join(encode(start)))
    (own / "order").write_text(json.dumps(order_of(manifest, start.port, start.nonce)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        return fork_module(__name__, [str(own), device], own / "log", environment)
    return subprocess.Popen([sys.executable, "-m", __name__, str(own), device], env=environment, text=True)


if __name__ == "__main__":
    sys.exit(receive(Path(sys.argv[1]), torch.device(sys.argv[2])))
