"""Memory that sleep frees: resident memory of each side before, asleep and after waking, on a CPU.

    python -m benchmarks.sleep_memory [--model FOLDER] [--repeats 3]

Each side is a process of its own with the real engine: the learner's after an optimiser step, the `hf` engine after it
has sampled, at both sleep levels. Without --model, one of 40 M parameters is made. Prints a Markdown table of medians;
"should free" is what the engine says has left the device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from asyncrl.config.schema import RunConfig

MIB = 1 << 20
SIDES = ("learner", "hf, level 1", "hf, level 2")
COLUMNS = ("before", "asleep", "awake", "should free", "sleep s", "wake s")
ROOT = Path(__file__).parent.parent
SIZE = ("--hidden", "512", "--intermediate", "2048", "--vision-dim", "64", "--vision-depth", "1")


def make_model(folder: Path) -> Path:
    command = [sys.executable, "-m", "asyncrl.demo.model", "--out", str(folder), *SIZE, "--layers", "9"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def measure(side: str, model: Path) -> dict[str, float]:
    """Measure in a fresh process: the memory of another side's past is not this one's."""
    command = [sys.executable, "-m", "benchmarks.sleep_memory", "--side", side, "--model", str(model)]
    # One arena: with one per thread, which of them keeps 16 MiB for reuse is a matter of luck.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def resident_mib() -> float:
    """Bytes in use: what the C library keeps for reuse is given back first."""
    import torch

    from asyncrl.devices.device import free_caches

    free_caches(torch.device("cpu"))
    return psutil.Process().memory_info().rss / MIB


def config_for(model: Path, run: str, level: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": run,
            "model": {"path": str(model), "dtype": "float32", "freeze_vision_tower": False},
            "data": {"train_files": ["none.jsonl"]},
            "batch": {"prompts_per_step": 4, "group_size": 4},
            "learner": {"device": "cpu"},
            "rollout": {"device": "cpu", "sleep_level": level},
            "reward": {"functions": [{"function": "exact_match"}]},
            "trainer": {"mode": "sync"},
        }
    )


def learner_side(model: Path, run: str) -> dict[str, float]:
    import torch

    from learner.training.engine import TorchEngine

    config = config_for(model, run, 1)
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    for parameter in engine.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    engine.optimizer_step()
    engine.sleep()  # the first time also takes memory of its own, once
    engine.wake()
    before, started = resident_mib(), time.monotonic()
    moved = engine.sleep()
    asleep, slept = resident_mib(), time.monotonic()
    engine.wake()
    woken = time.monotonic()
    return row(before, asleep, moved, slept - started, woken - slept)


async def rollout_side(model: Path, run: str, level: int) -> dict[str, float]:
    from safetensors.torch import load_file, save_file

    from asyncrl.devices.sleeping import fixed_tokens
    from asyncrl.models.published import published_tensors
    from asyncrl.processing.encoded_prompt import EncodedPrompt
    from asyncrl.processing.processor import PromptProcessor
    from protocol.messages import Sampling
    from rollout_server.engines.base import GenerationRequest
    from rollout_server.engines.hf.engine import HFEngine

    config = config_for(model, run, level)
    processor = PromptProcessor(config.model)
    engine = HFEngine(config, processor)
    await engine.start()
    sampling = Sampling(max_new_tokens=64, stop_token_ids=(), banned_token_ids=processor.placeholder_ids)
    prompt = EncodedPrompt.of_text(fixed_tokens(300, processor.placeholder_ids))
    async for _ in engine.generate([GenerationRequest(n, prompt, 16, n, sampling) for n in range(4)]):
        pass
    file = Path(run) / "weights"
    if level == 2:  # as they would come from the learner: from outside this process
        save_file({name: tensor.clone() for name, tensor in published_tensors(engine._model)}, file)
    else:
        await engine.sleep()  # the first time also takes memory of its own, once
        await engine.wake()
    before, started = resident_mib(), time.monotonic()
    await engine.sleep()
    asleep, slept = resident_mib(), time.monotonic()
    await engine.wake()
    woken = time.monotonic()
    if level == 2:
        await engine.update_weights(1, load_file(file).items())
    result = row(before, asleep, engine.usage.sleep_bytes, slept - started, woken - slept)
    await engine.close()
    return result


def row(before: float, asleep: float, moved: int, sleep_s: float, wake_s: float) -> dict[str, float]:
    values = (before, asleep, resident_mib(), moved / MIB, sleep_s, wake_s)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help="of this process; the others are not started")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-sleep-") as scratch:
        if arguments.side == "learner":
            print(json.dumps(learner_side(arguments.model, scratch)))
            return
        if arguments.side:
            print(json.dumps(asyncio.run(rollout_side(arguments.model, scratch, int(arguments.side[-1])))))
            return
        model = arguments.model or make_model(Path(scratch) / "model")
        print("| resident MiB of | before | asleep | awake | freed | should free | sleep s | wake s |")
        print("|---|---|---|---|---|---|---|---|")
        for side in SIDES:
            runs = [measure(side, model) for _ in range(arguments.repeats)]
            middle = {column: median(run[column] for run in runs) for column in COLUMNS}
            memory = [middle["before"], middle["asleep"], middle["awake"], middle["before"] - middle["asleep"]]
            cells = [f"{value:.0f}" for value in (*memory, middle["should free"])]
            print(f"| {side} | {' | '.join(cells)} | {middle['sleep s']:.2f} | {middle['wake s']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
