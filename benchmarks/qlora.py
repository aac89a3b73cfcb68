"""Adapters on a base in 4 bits beside adapters on the base as it is: held-out accuracy on the digit task.

    python -m benchmarks.qlora [key=value ...] --folder FOLDER [--seeds 1 2 3] [--jobs 2] [--print]

Every run trains adapters of the language model from the demo's warm start, and has the demo's length unless an override
says otherwise (`trainer.max_steps=60`). Runs that are in FOLDER/runs.jsonl are skipped, so that the table can be
continued (benchmarks/demo_runs.py). Prints Markdown. Accuracy before training is that of the base as it is sampled:
nf4's own loss is seen there.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from asyncrl.telemetry.jsonl import read_lines
from benchmarks.demo_runs import Run, make_table, read_run, table_parser

MEASURED_FROM = 10
"""The pipeline is full from here on; means over a run's steps begin here."""
MOST_SECONDS = 3600
ADAPTERS = ("model.lora.rank=8", "learner.optim.lr=1e-3", "evaluation.every_steps=0")
BASES = {"as it is": (), "nf4": ("model.quantization=nf4",)}


def read(run_dir: Path) -> dict[str, Any]:
    first = read_lines(run_dir / "evaluations.jsonl")[0]
    return {"before": first["accuracy"]} | read_run(run_dir, MEASURED_FROM, ("step_s", "learn_s", "mismatch_kl_k3"))


def print_table(measured: list[dict[str, Any]]) -> None:
    """One row for each base; accuracies as mean ± standard deviation over the seeds."""
    print(f"\n{measured[0]['steps']} learner steps, {measured[0]['rows']} held-out rows\n")
    print("| base | seeds | accuracy before | after | reward of the last 10 steps | mismatch KL | learner s per step |")
    print("|---|---|---|---|---|---|---|")
    for base in BASES:
        if lines := [line for line in measured if line["base"] == base]:
            before, after = (_spread([line[key] for line in lines]) for key in ("before", "accuracy"))
            seeds = ", ".join(str(line["seed"]) for line in lines)
            reward, kl, seconds = (
                mean(line[key] for line in lines) for key in ("reward_last_10", "mismatch_kl_k3", "learn_s")
            )
            print(f"| {base} | {seeds} | {before} | {after} | {reward:.3f} | {kl:.1e} | {seconds:.2f} |")


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def main() -> None:
    arguments = table_parser(__doc__).parse_intermixed_args()
    wanted = [
        Run((("base", base),), seed, (*ADAPTERS, *words)) for seed in arguments.seeds for base, words in BASES.items()
    ]
    make_table(arguments, wanted, read, print_table, MOST_SECONDS)


if __name__ == "__main__":
    main()
