"""Held-out accuracy against staleness with and without off-policy correction, on the digit task at a reduced setting.

    python benchmarks/off_policy_table.py --folder FOLDER [--warm-starts FOLDER] [--jobs 2] [--print]

Every run starts from the demo's warm start, with its seed's data (made first, or taken from the folder of
`benchmarks/demo_seeds.py --folder`), takes STEPS learner steps of UPDATES optimiser steps each at a learning rate
that is too high for stale samples, and reads held-out accuracy once, at the end. One line per finished run is appended
to FOLDER/runs.jsonl; runs that stand there are skipped, so that the table can be continued. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "asyncrl" / "demo"
STEPS = 80
UPDATES = 4
LEARNING_RATE = 2e-4
STALENESS: tuple[int | str, ...] = (0, 1, 2, 4, 8)
SEEDS = (1, 2, 3)
MEASURED_FROM = STEPS // 4
"""The pipeline is full from here on; means over a run's steps begin here."""
MOST_SECONDS = 900
"""A run that takes longer is stopped and not recorded."""

ARMS: Mapping[str, tuple[str, ...]] = {
    "none": ("algorithm.proximal=recompute", "algorithm.correction.kind=none"),
    "token_tis": ("algorithm.proximal=target", "algorithm.correction.kind=token_tis"),
    "decoupled_tis": ("algorithm.proximal=recompute", "algorithm.correction.kind=token_tis"),
    "icepop": ("algorithm.proximal=recompute", "algorithm.correction.kind=icepop"),
    "ppo_behaviour": ("algorithm.proximal=behaviour", "algorithm.correction.kind=none"),
}
MEANING: Mapping[str, str] = {
    "none": "PPO around the learner's policy at the start of the step; stale samples are taken as fresh (weight 1)",
    "token_tis": "policy gradient without a clip, each token weighted by min(pi_target / pi_behaviour, 2)",
    "decoupled_tis": "decoupled PPO: clip as in `none`, each token weighted by min(pi_proximal / pi_behaviour, 2)",
    "icepop": "clip as in `none`, weight pi_proximal / pi_behaviour where it is within [0.5, 5], else 0",
    "ppo_behaviour": "plain PPO on the engine's log-probs: the clip is around the behaviour policy, no other weight",
}


@dataclass(frozen=True)
class Run:
    arm: str
    staleness: int | str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.staleness}-{self.seed}"


class Table:
    """Runs what is missing, and keeps what was measured."""

    def __init__(self, folder: Path, warm_starts: Path, overrides: list[str]):
        self.folder = folder
        self.warm_starts = warm_starts
        self.overrides = overrides
        self.lines = folder / "runs.jsonl"
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def measured(self) -> list[dict[str, Any]]:
        if not self.lines.exists():
            return []
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def prepare(self, seed: int) -> None:
        """Data of a seed beside the demo's warm start, unless they are there."""
        folder = self.warm_starts / f"seed-{seed}"
        if not (folder / "config.yaml").is_file():
            _call(["-m", "asyncrl.demo.prepare", "--folder", str(folder), "--seed", str(seed)], folder / "prepare.log")

    def run(self, run: Run) -> None:
        start, run_dir = self.warm_starts / f"seed-{run.seed}", self.folder / run.name
        shutil.rmtree(run_dir, ignore_errors=True)  # of an attempt that was cut off
        overrides = [
            f"run_dir={run_dir}",
            f"model.path={start}/warm_start",
            f"data.train_files=[{start}/data/rl.parquet]",
            f"data.val_files=[{start}/data/eval.parquet]",
            f"trainer.seed={run.seed}",
            f"trainer.max_steps={STEPS}",
            "trainer.save_freq=0",
            "trainer.samples_per_step=0",
            "evaluation.before_training=false",
            "evaluation.every_steps=0",
            f"algorithm.updates_per_batch={UPDATES}",
            f"learner.optim.lr={LEARNING_RATE}",
            f"learner.max_staleness={run.staleness}",
            *ARMS[run.arm],
            *("learner.cpu_threads=1", "rollout.cpu_threads=1", "reward.workers=1"),
            *(f"{port}=0" for port in ("network.control_port", "network.weights_port")),
            *(f"{port}=0" for port in ("telemetry.learner_port", "telemetry.rollout_port")),
            *self.overrides,
        ]
        command = ["-m", "asyncrl", "train", str(DEMO / "grpo.yaml"), *overrides]
        began = time.monotonic()
        _call(command, self.folder / f"{run.name}.log")
        line = {"arm": run.arm, "staleness": run.staleness, "seed": run.seed, "wall_s": time.monotonic() - began}
        line |= _read(run_dir)
        with self._lock, self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shutil.rmtree(run_dir / "export", ignore_errors=True)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        print(f"{run.name}: accuracy {line['accuracy']:.3f}, {line['wall_s']:.0f} s", flush=True)


def _call(command: list[str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=MOST_SECONDS
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: see {log}")


def _read(run_dir: Path) -> dict[str, float]:
    """What one run showed: accuracy at the end, and means over its steps once the pipeline is full."""
    evaluation = json.loads((run_dir / "evaluations.jsonl").read_text().splitlines()[-1])
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    full = steps[MEASURED_FROM:]

    def average(key: str) -> float:
        return mean(step[key] for step in full)

    return {
        "accuracy": evaluation["accuracy"],
        "rows": evaluation["rows"],
        "steps": len(steps),
        "reward_last_10": mean(step["reward/mean"] for step in steps[-10:]),
        "train_s": sum(step["step_s"] for step in steps),
        "step_s": average("step_s"),
        "learner_idle": average("idle/learner"),
        "staleness_mean": average("staleness/mean"),
        "staleness_max": max(step["staleness/max"] for step in steps),
        "ess": average("ess"),
        "mismatch_kl_k3": average("mismatch_kl_k3"),
        "ratio_max": max(step["ratio_max"] for step in steps),
        "clip_fraction": average("clip_fraction"),
        "mask_fraction": average("mask_fraction"),
        "truncation_fraction": average("truncation_fraction"),
        "entropy_last_10": mean(step["entropy"] for step in steps[-10:]),
    }


def print_table(measured: list[dict[str, Any]]) -> None:
    """One row per arm and bound; accuracy as mean ± standard deviation over the seeds."""
    print(
        f"\n{measured[0]['steps']} learner steps of {UPDATES} optimiser steps, learning rate {LEARNING_RATE:g}, "
        f"{measured[0]['rows']} held-out rows\n"
    )
    print("| arm | max_staleness | realised | held-out accuracy | ESS | mismatch KL | masked | s per step | run s |")
    print("|---|---|---|---|---|---|---|---|---|")
    seen = list(dict.fromkeys(str(line["staleness"]) for line in measured))
    bounds = sorted(seen, key=lambda bound: (not bound.isdigit(), int(bound) if bound.isdigit() else 0))
    for arm in ARMS:
        for bound in bounds:
            lines = [line for line in measured if line["arm"] == arm and str(line["staleness"]) == bound]
            if not lines:
                continue
            accuracy = [line["accuracy"] for line in lines]
            spread = f" ± {stdev(accuracy):.3f}" if len(lines) > 1 else ""
            cells = {key: mean(line[key] for line in lines) for key in lines[0] if key not in ("arm", "staleness")}
            print(
                f"| {arm} | {bound} | {cells['staleness_mean']:.2f} | {mean(accuracy):.3f}{spread} ({len(lines)}) "
                f"| {cells['ess']:.3f} | {cells['mismatch_kl_k3']:.4f} | {cells['mask_fraction']:.3f} "
                f"| {cells['step_s']:.2f} | {cells['wall_s']:.0f} |"
            )
    print()
    for arm, meaning in MEANING.items():
        print(f"- `{arm}`: {meaning}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="results and logs")
    parser.add_argument("--warm-starts", type=Path, default=None, help="seed-N/data and seed-N/sft/export")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--staleness", nargs="+", default=STALENESS, help="bounds; `auto` is one, too")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--print", action="store_true", help="only print what has been measured")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    arguments = parser.parse_intermixed_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    folder: Path = arguments.folder.resolve()
    warm_starts = (arguments.warm_starts or folder / "warm-starts").resolve()
    table = Table(folder, warm_starts, arguments.overrides)
    if not arguments.print:
        wanted = [Run(arm, s, seed) for seed in arguments.seeds for arm in arguments.arms for s in arguments.staleness]
        done = {f"{line['arm']}-{line['staleness']}-{line['seed']}" for line in table.measured()}
        missing = [run for run in wanted if run.name not in done]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(table.prepare, sorted({run.seed for run in missing})))
            list(pool.map(table.run, missing))
    if table.measured():
        print_table(table.measured())


if __name__ == "__main__":
    main()
