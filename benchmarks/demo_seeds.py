"""The demo with several seeds and settings from one warm start: the tables of docs/lab-log/learning.md.

python benchmarks/demo_seeds.py [--seeds 1 2 3] [--each key=value ...] [--folder KEPT] [--from-scratch] [--quick] ...

Each seed makes its data once (or takes what an earlier call left in KEPT), then trains the demo's warm start by GRPO
once for each override in `--each`; the other overrides hold for all GRPO runs. Runs whose weights are not fp32 get a
second table: how far the fp32 master weights and the published weights are apart at the end, and how far each have
moved from the weights that GRPO began with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

import torch

from asyncrl.config.load import load_config
from asyncrl.models.loading import load_model
from asyncrl.run_folder.contents import MODEL_FOLDER
from asyncrl.telemetry.jsonl import read_lines
from learner.loop.checkpoint import newest_checkpoint
from learner.training.engine import ENGINE_FILE

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--each", nargs="+", default=[""], metavar="key=value", help="one GRPO run for each of these")
    parser.add_argument("--folder", type=Path, default=None, help="keep the runs here")
    parser.add_argument("--from-scratch", action="store_true", help="a warm start of its own for each seed")
    parser.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all GRPO runs' configuration")
    arguments = parser.parse_intermixed_args()
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="asyncrl-demo-"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    runs: dict[tuple[int, str], Path] = {}
    seconds: dict[Path, float] = {}
    for seed in arguments.seeds:
        folder = root / f"seed-{seed}"
        if not (folder / "config.yaml").exists():
            flags = ["--quick"] * arguments.quick + ["--from-scratch"] * arguments.from_scratch
            call("-m", "asyncrl.demo.prepare", "--folder", str(folder), "--seed", str(seed), *flags)
        for each in arguments.each:
            run = runs[seed, each] = folder / f"grpo-{each.partition('=')[2].replace('/', '-') or 'default'}"
            changes = [f"run_dir={run}", *([each] if each else []), *arguments.overrides]
            started = time.monotonic()
            call("-m", "asyncrl", "train", str(folder / "config.yaml"), *changes)
            seconds[run] = time.monotonic() - started
    print(f"\n{len(os.sched_getaffinity(0))} cores, {evaluations(next(iter(seconds)))[0]['rows']} held-out rows\n")
    print("| seed | setting | held-out before | halfway | after | gain | reward first 10 | last 10 | GRPO s |")
    print("|---|---|---|---|---|---|---|---|---|")
    gains: dict[str, list[float]] = {each: [] for each in arguments.each}
    for (seed, each), run in runs.items():
        accuracy = [evaluation["accuracy"] for evaluation in evaluations(run)]
        gains[each].append(accuracy[-1] - accuracy[0])
        rewards = [step["reward/mean"] for step in read_lines(run / "metrics.jsonl")]
        print(
            f"| {seed} | {each} | {accuracy[0]:.3f} | {accuracy[len(accuracy) // 2]:.3f} | {accuracy[-1]:.3f} "
            f"| {gains[each][-1]:+.3f} | {mean(rewards[:10]):.3f} | {mean(rewards[-10:]):.3f} | {seconds[run]:.0f} |"
        )
    print()
    for each, values in gains.items():
        spread = f" (standard deviation {stdev(values):.3f})" if len(values) > 1 else ""
        print(f"{each or 'as configured'}: mean gain {mean(values):+.3f}{spread}")
    distances = {key: master_distances(run) for key, run in runs.items()}
    if any(distances.values()):
        print("\n| seed | setting | master - published | masters moved | published moved | published that changed |")
        print("|---|---|---|---|---|---|")
        for (seed, each), values in distances.items():
            if values:
                apart, masters, published, changed = values
                print(f"| {seed} | {each} | {apart:.2e} | {masters:.2e} | {published:.2e} | {changed:.1%} |")


def call(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True)


def evaluations(run: Path) -> list[dict[str, float]]:
    return read_lines(run / "evaluations.jsonl")


def master_distances(run: Path) -> tuple[float, ...]:
    """RMS of a run's last master weights minus the published ones, and of each minus those at the start, all relative
    to the masters' RMS; and the share of published weights that changed. Empty where the parameters are fp32."""
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None, f"{run} has no checkpoint"
    masters = torch.load(checkpoint / ENGINE_FILE, weights_only=True)["masters"]
    if not masters:
        return ()
    config = load_config(run / "config.yaml").model
    start, end = (
        torch.cat([parameters[name].detach().float().view(-1) for name in masters])
        for folder in (config.path, checkpoint / MODEL_FOLDER)
        for parameters in [
            dict(load_model(config.model_copy(update={"path": str(folder)}), device=CPU).named_parameters())
        ]
    )
    exact = torch.cat([master.view(-1) for master in masters.values()])
    rms = [float(difference.pow(2).mean().sqrt()) for difference in (exact - end, exact - start, end - start)]
    return (*(value / float(exact.pow(2).mean().sqrt()) for value in rms), float((end != start).float().mean()))


if __name__ == "__main__":
    main()
