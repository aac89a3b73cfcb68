"""Publishing adapters against publishing the whole model: bytes, and seconds on both sides.

    python benchmarks/adapter_publication.py [--model FOLDER] [--repeats 20]

Without a folder, the model of examples/digits is made. A version is written to shared memory by the training engine
and taken up by the `hf` engine, in one process; times are medians. Checksums are computed and verified as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from learner.engines import create_engine as create_train_engine
from learner.publication import open_publication, publish
from rollout_server.engines import create_engine
from rollout_server.weights import WeightReceiver

ROOT = Path(__file__).parent.parent
KINDS: dict[str, dict[str, Any]] = {
    "whole model": {},
    "rank 4": {"rank": 4},
    "rank 4, vision tower too": {"rank": 4, "vision_tower": True},
    "rank 8": {"rank": 8},
    "rank 16": {"rank": 16},
}


@dataclass(frozen=True)
class Measured:
    tensors: int
    nbytes: int
    publish_ms: float
    load_ms: float


def make_demo_model(folder: Path) -> Path:
    argv = sys.argv
    sys.argv = ["make_model.py", "--out", str(folder)]
    try:
        runpy.run_path(str(ROOT / "examples" / "digits" / "make_model.py"), run_name="__main__")
    finally:
        sys.argv = argv
    return folder


def config_of(model: Path, lora: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": str(model), "freeze_vision_tower": False, "lora": lora},
            "data": {"train_files": ["unused.parquet"]},
            "reward": {"functions": [{"function": "exact_match"}]},
        }
    )


async def measure(config: RunConfig, repeats: int) -> Measured:
    trainer = create_train_engine(config, config.learner.optim, 1)
    trainer.prepare()
    engine = create_engine(config, PromptProcessor(config.model))
    await engine.start()
    receiver = WeightReceiver(config, engine, "shm", "tcp://127.0.0.1:9")
    publishing, loading = [], []
    try:
        with open_publication("benchmark") as publication:
            for version in range(repeats):
                started = time.perf_counter()
                manifest = publish(publication, trainer, version)
                publishing.append(time.perf_counter() - started)
                loaded = await receiver.load(manifest)
                loading.append(loaded.transfer_s + loaded.load_s)
    finally:
        receiver.close()
        await engine.close()
    return Measured(len(manifest.tensors), manifest.total_bytes, 1000 * median(publishing), 1000 * median(loading))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the digit model, made now")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or make_demo_model(Path(scratch) / "model")
        results = {
            name: asyncio.run(measure(config_of(model, lora), arguments.repeats)) for name, lora in KINDS.items()
        }
    whole = results["whole model"]
    print("| what is published | tensors | bytes | smaller by | publish, ms | take up, ms |")
    print("|---|---|---|---|---|---|")
    for name, m in results.items():
        print(
            f"| {name} | {m.tensors} | {m.nbytes:,} | {whole.nbytes / m.nbytes:.1f} | {m.publish_ms:.2f} | "
            f"{m.load_ms:.2f} |"
        )


if __name__ == "__main__":
    main()
