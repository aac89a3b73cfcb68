"""Wall-clock of a run with evaluations against the same run without: what do they cost?

    python benchmarks/evaluation_cost.py --model FOLDER --data FOLDER [--repeats 3] [--steps 40]

Both settings are run in turn, so that a change of the machine's speed meets both. The wall-clock is that from the end
of the first step to the end of the last: evaluations after every tenth step are in it, that after the last is not.
Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from asyncrl.telemetry.jsonl import read_lines

CONFIG = Path(__file__).parent.parent / "asyncrl" / "demo" / "grpo.yaml"
EVERY_STEPS = 10


def run(arguments: argparse.Namespace, every_steps: int, folder: Path) -> dict[str, float]:
    """Seconds of one run, and of its evaluations before the last step."""
    overrides = [
        f"run_dir={folder}",
        f"model.path={arguments.model}",
        f"data.train_files=[{arguments.data}/rl.parquet]",
        f"data.val_files=[{arguments.data}/eval.parquet]",
        f"data.max_val_rows={arguments.rows}",
        f"trainer.max_steps={arguments.steps}",
        f"evaluation.every_steps={every_steps}",
        "evaluation.before_training=false",
        "batch.prompts_per_step=8",
        "learner.cpu_threads=1",
        "rollout.cpu_threads=1",
        "network.control_port=0",
        "network.weights_port=0",
        "telemetry.learner_port=0",
        "telemetry.rollout_port=0",
        *arguments.overrides,
    ]
    command = [sys.executable, "-m", "asyncrl", "train", str(CONFIG), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    times = [record["time"] for record in read_lines(folder / "metrics.jsonl")]
    evaluations = [e for e in read_lines(folder / "evaluations.jsonl") if e["step"] < arguments.steps]
    return {
        "run": times[-1] - times[0],
        "evaluations": sum(e.get("seconds", 0.0) for e in evaluations),
        "waited": sum(e.get("waited_s", 0.0) for e in evaluations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=128, help="held-out rows")
    parser.add_argument("overrides", nargs="*", help="key=value for both settings")
    arguments = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    without: list[dict[str, float]] = []
    evaluated: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(arguments.repeats):
            without.append(run(arguments, 0, Path(scratch) / f"without-{repeat}"))
            evaluated.append(run(arguments, EVERY_STEPS, Path(scratch) / f"with-{repeat}"))
    print(f"{len(os.sched_getaffinity(0))} cores, {arguments.repeats} pairs of runs of {arguments.steps} steps\n")
    print("| evaluation | seconds of the run | of its evaluations | of these the learner waited |\n|---|---|---|---|")
    for name, runs in (("none", without), (f"{arguments.rows} rows every {EVERY_STEPS} steps", evaluated)):
        cells = [median(one[key] for one in runs) for key in ("run", "evaluations", "waited")]
        print(f"| {name} | {cells[0]:.1f} | {cells[1]:.1f} | {cells[2]:.1f} |")
    ratios = sorted(b["run"] / a["run"] for a, b in zip(without, evaluated, strict=True))
    print(f"\nwith / without: median {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
