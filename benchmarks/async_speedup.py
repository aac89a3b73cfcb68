"""Wall-clock per step with `max_staleness: 2` against `max_staleness: 0`: same machine, same cores for each side.

    python benchmarks/async_speedup.py --model FOLDER --data FOLDER [--repeats 3] [--steps 30]

Both settings are run in turn, so that a change of the machine's speed meets both. Prints a Markdown table of medians:
seconds per step, the idle ratio of each side, and the ideal ratio `max(gen, train) / (gen + train)` from the
synchronous runs' own phases.
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
WARM_UP_STEPS = 5
"""Left out of every median: engines warm up, the pipeline fills."""


def run(arguments: argparse.Namespace, staleness: int, folder: Path) -> list[dict[str, float]]:
    """The step records of one run."""
    overrides = [
        f"run_dir={folder}",
        f"model.path={arguments.model}",
        f"data.train_files=[{arguments.data}/rl.parquet]",
        f"data.val_files=[{arguments.data}/eval.parquet]",
        f"learner.max_staleness={staleness}",
        f"trainer.max_steps={arguments.steps}",
        "evaluation.before_training=false",
        "data.max_val_rows=8",
        "network.control_port=0",
        "network.weights_port=0",
        "network.heartbeat_s=0.25",
        "telemetry.learner_port=0",
        "telemetry.rollout_port=0",
        *arguments.overrides,
    ]
    command = [sys.executable, "-m", "asyncrl", "train", str(CONFIG), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_lines(folder / "metrics.jsonl")[WARM_UP_STEPS:]


def middle(records: list[dict[str, float]], key: str) -> float:
    return median(record[key] for record in records if record.get(key) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*", help="key=value for both settings")
    arguments = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(arguments.repeats):
            sync = run(arguments, 0, Path(scratch) / f"sync-{repeat}")
            overlapped = run(arguments, 2, Path(scratch) / f"async-{repeat}")
            learn = middle(sync, "learn_s") + middle(sync, "publish_s")
            wait = middle(sync, "wait_s")
            rows.append(
                {
                    "sync": middle(sync, "step_s"),
                    "async": middle(overlapped, "step_s"),
                    "ratio": middle(overlapped, "step_s") / middle(sync, "step_s"),
                    "ideal": max(learn, wait) / (learn + wait),
                    "sync_idle_learner": middle(sync, "idle/learner"),
                    "sync_idle_rollout": middle(sync, "idle/rollout"),
                    "async_idle_learner": middle(overlapped, "idle/learner"),
                    "async_idle_rollout": middle(overlapped, "idle/rollout"),
                }
            )
    print(f"{len(os.sched_getaffinity(0))} cores, {arguments.repeats} pairs of runs of {arguments.steps} steps\n")
    print("| max_staleness | s per step | learner idle | rollout idle |\n|---|---|---|---|")
    for name, staleness in (("sync", 0), ("async", 2)):
        cells = [median(row[key] for row in rows) for key in (name, f"{name}_idle_learner", f"{name}_idle_rollout")]
        print(f"| {staleness} | {cells[0]:.3f} | {cells[1]:.2f} | {cells[2]:.2f} |")
    ratios = sorted(row["ratio"] for row in rows)
    print(
        f"\nratio of seconds per step, asynchronous / synchronous: median {median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}); ideal {median(row['ideal'] for row in rows):.2f}"
    )


if __name__ == "__main__":
    main()
