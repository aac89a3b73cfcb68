"""Time that kept features of images save of a learner's step, against the ideal, on a CPU.

    python -m benchmarks.vision_reuse [--rounds 7] [--side 112]

The step scores its batch with policy and reference and trains it in two updates, so that an image passes the frozen
tower three times. Steps that compute features in each pass and steps that begin with none and keep them take turns, on
one thread. The ideal saving is the tower's time in the former times the share of images that the latter find again.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from asyncrl.config.schema import RunConfig
from asyncrl.demo import model as demo_model
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from learner.training.vision_features import VisionFeatures
from tests.rigs.made_up_batch import made_up_batch

SIZE = "--hidden 256 --intermediate 1024 --layers 4 --vision-dim 256 --vision-depth 4 --vision-heads 4"
PROMPTS, COMPLETIONS, TOKENS = 8, 4, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", type=int, default=112, help="pixels of an image's side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(make_config(Path(folder), arguments.side), arguments.rounds)


def make_config(folder: Path, side: int) -> RunConfig:
    demo_model.main(["--out", str(folder / "model"), *SIZE.split()])
    draw = np.random.default_rng(0)
    lines: list[str] = []
    for number in range(PROMPTS):
        picture = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8)).save(picture, "PNG")
        (folder / f"{number}.png").write_bytes(picture.getvalue())
        lines.append(
            json.dumps({"prompt": "<image>Which digits are these?", "answer": "3 7", "images": [f"{number}.png"]})
        )
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {
                "path": str(folder / "model"),
                "dtype": "float32",
                "freeze_vision_tower": True,
                "freeze_connector": True,
            },
            "data": {
                "train_files": [str(folder / "rows.jsonl")],
                "max_prompt_length": 1024,
                "max_response_length": TOKENS,
            },
            "batch": {"prompts_per_step": PROMPTS, "group_size": COMPLETIONS, "tokens_per_microbatch": 2048},
            "algorithm": {"updates_per_batch": 2, "kl_loss_coef": 0.01},
            "learner": {"device": "cpu"},
            "reward": {"functions": [{"function": "asyncrl.demo.reward:answer"}]},
        }
    )


def measure(config: RunConfig, rounds: int) -> None:
    engine, reference = (
        TorchEngine(config.model_settings, config.learner.optim, 1),
        Reference(config.reference_settings, config.reference),
    )
    towers = [Tower(role) for role in (engine, reference)]
    step = LearnerStep(Roles(engine, None, reference), config.step_settings)
    batch = made_up_batch(config, PromptProcessor(config.model))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    in_tower: dict[bool, list[float]] = {False: [], True: []}
    said: dict[str, float] = {}
    step(batch, 3)  # warm
    for _ in range(rounds):
        for keeps in seconds:
            features = VisionFeatures(2**30) if keeps else None
            engine.features = reference.features = features
            before, started = sum(tower.seconds for tower in towers), time.process_time()
            step(batch, 3)
            seconds[keeps].append(time.process_time() - started)
            in_tower[keeps].append(sum(tower.seconds for tower in towers) - before)
            said = features.report() if features else said
    plain, kept = median(seconds[False]), median(seconds[True])
    share = median(in_tower[False]) / plain
    ideal = plain * share * said["vision/reused"]
    print("| features | CPU s of a step | of which in the tower |\n|---|---|---|")
    print(f"| computed in each pass | {plain:.2f} | {median(in_tower[False]):.2f} |")
    print(f"| kept | {kept:.2f} | {median(in_tower[True]):.2f} |")
    print(
        f"\n{said['vision/images']:.0f} images asked for, {said['vision/reused']:.2f} of them found again; the tower's "
        f"share {share:.2f}. Saved {plain - kept:.2f} s of an ideal {ideal:.2f} s: {(plain - kept) / ideal:.2f}"
    )


class Tower:
    """CPU time of an engine's vision tower and connector."""

    def __init__(self, engine: TorchEngine):
        engine.prepare()
        self.seconds = 0.0
        inner = engine.model.base_model
        original = inner.get_image_features

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - started

        inner.get_image_features = timed


if __name__ == "__main__":
    main()
