"""The demo with several seeds and one setting: the table of docs/results.md.

python benchmarks/demo_seeds.py [--seeds 1 2 3] [--folder KEPT] [--quick] [key=value ...]

Overrides are those of the GRPO runs. With model.dtype=bfloat16 a second table says how far the fp32 master weights and
the published weights are apart at the end, and how far each have moved from the weights that GRPO began with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch

from asyncrl.config.load import load_config
from asyncrl.models.loading import load_model
from asyncrl.run_folder.checkpoints import MODEL_FOLDER
from learner.checkpoint.storage import newest_checkpoint
from learner.training.engine import ENGINE_FILE

CPU = torch.device("cpu")
DEMO = Path(__file__).parent.parent / "examples" / "digits" / "demo.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=None, help="keep the runs here")
    parser.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the GRPO runs' configuration")
    arguments = parser.parse_intermixed_args()
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="asyncrl-demo-"))
    rows = []
    for seed in arguments.seeds:
        folder = root / f"seed-{seed}"
        command = [
            sys.executable,
            str(DEMO),
            "--seed",
            str(seed),
            "--folder",
            str(folder),
            *["--quick"] * arguments.quick,
        ]
        subprocess.run([*command, *arguments.overrides], check=True)
        rows.append(json.loads((folder / "summary.json").read_text()))
    print(f"\n{len(os.sched_getaffinity(0))} cores, {rows[0]['held_out_rows']} held-out rows\n")
    print("| seed | held-out before | held-out after | gain | reward first 10 | reward last 10 | total s |")
    print("|---|---|---|---|---|---|---|")
    gains = [row["accuracy_after"] - row["accuracy_before"] for row in rows]
    for row, gain in zip(rows, gains, strict=True):
        print(
            f"| {row['seed']} | {row['accuracy_before']:.3f} | {row['accuracy_after']:.3f} | {gain:+.3f} "
            f"| {row['reward_first_10_steps']:.3f} | {row['reward_last_10_steps']:.3f} "
            f"| {sum(row['seconds'].values()):.0f} |"
        )
    spread = f" (standard deviation {stdev(gains):.3f})" if len(gains) > 1 else ""
    print(f"\nmean gain {mean(gains):+.3f}{spread}")
    distances = {seed: master_distances(root / f"seed-{seed}" / "grpo") for seed in arguments.seeds}
    if any(distances.values()):
        print("\n| seed | master - published | masters moved | published moved | published weights that changed |")
        print("|---|---|---|---|---|")
        for seed, values in distances.items():
            apart, masters, published, changed = values
            print(f"| {seed} | {apart:.2e} | {masters:.2e} | {published:.2e} | {changed:.1%} |")


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
