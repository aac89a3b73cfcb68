"""Publishing adapters against publishing the whole model: bytes, and seconds on both sides.

    python benchmarks/adapter_publication.py [--model FOLDER] [--repeats 50]

Without a folder, the demo's model is made. A version is written to shared memory by the training engine
and taken up by the `hf` engine, in one process; times are medians. Checksums are computed and verified as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.demo.model import main as make_model
from asyncrl.processing.processor import PromptProcessor
from learner.network.publication import publish
from learner.training.engine import TorchEngine
from protocol.endpoints import SHARED_MEMORY
from protocol.weights import Publication
from rollout_server.engines import create_engine
from rollout_server.weights.receiver import WeightReceiver

KINDS: dict[str, dict[str, Any]] = {
    "whole model": {},
    "rank 4": {"rank": 4},
    "rank 4, vision tower too": {"rank": 4, "vision_tower": True},
    "rank 8": {"rank": 8},
    "rank 16": {"rank": 16},
}


def make_demo_model(folder: Path) -> Path:
    make_model(["--out", str(folder)])
    return folder


def config_of(model: Path, lora: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": str(model), "dtype": "float32", "freeze_vision_tower": False, "lora": lora},
            "data": {"train_files": ["unused.parquet"]},
            "reward": {"functions": [{"function": "exact_match"}]},
        }
    )


class Pair:
    """A learner's training engine and a server's `hf` engine, with a publication between them."""

    def __init__(self, config: RunConfig):
        self._trainer = TorchEngine(config.model_settings, config.learner.optim, 1)
        self._trainer.prepare()
        self._engine = create_engine(config, PromptProcessor(config.model))
        self._publication = Publication("benchmark", SHARED_MEMORY)
        self._receiver = WeightReceiver(
            config.model.path,
            config.network,
            config.first_meeting_s,
            self._engine,
            "shm",
            "tcp://127.0.0.1:9",
        )
        self.publish_s: list[float] = []
        self.load_s: list[float] = []

    async def start(self) -> None:
        await self._engine.start()

    async def pass_on(self, version: int) -> None:
        started = time.perf_counter()
        self.manifest = publish(self._publication, self._trainer, version)
        self.publish_s.append(time.perf_counter() - started)
        loaded = await self._receiver.load(self.manifest)
        self.load_s.append(loaded.transfer_s + loaded.load_s)

    async def close(self) -> None:
        self._publication.close()
        self._receiver.close()
        await self._engine.close()


async def measure(model: Path, repeats: int) -> dict[str, Pair]:
    """Measure alternately, so that a change of the machine's speed meets all arms."""
    pairs = {name: Pair(config_of(model, lora)) for name, lora in KINDS.items()}
    for pair in pairs.values():
        await pair.start()
    for version in range(repeats):
        for pair in pairs.values():
            await pair.pass_on(version)
    for pair in pairs.values():
        await pair.close()
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the digit model, made now")
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or make_demo_model(Path(scratch) / "model")
        pairs = asyncio.run(measure(model, arguments.repeats))
    whole = pairs["whole model"].manifest.total_bytes
    print("| what is published | tensors | bytes | smaller by | publish, ms | take up, ms |")
    print("|---|---|---|---|---|---|")
    for name, pair in pairs.items():
        size = pair.manifest.total_bytes
        print(
            f"| {name} | {len(pair.manifest.tensors)} | {size:,} | {whole / size:.1f} | "
            f"{1000 * median(pair.publish_s):.2f} | {1000 * median(pair.load_s):.2f} |"
        )


if __name__ == "__main__":
    main()
