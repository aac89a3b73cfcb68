"""Held-out accuracy of every algorithm on the digit task: one row for each overlay of configs/algorithms.

    python -m benchmarks.algorithm_table [key=value ...] --folder FOLDER [--algorithms rloo gspo] [--seeds 1 2 3]
        [--jobs 2] [--print]

Every run starts from the demo's warm start and has the demo's length, unless an override for every run says otherwise
(`trainer.max_steps=100`). With one optimiser step per batch the policy does not move between its log-probs and its
loss, so that losses which differ by their clip alone are the same: `algorithm.updates_per_batch=4` tells them apart.
Runs that are in FOLDER/runs.jsonl are skipped, so that the table can be continued (benchmarks/demo_runs.py). Prints
Markdown, best first.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from asyncrl.config.installed_methods import methods
from asyncrl.config.load import shipped_overlays
from asyncrl.telemetry.jsonl import read_lines
from benchmarks.demo_runs import Run, make_table, read_run, table_parser

MEASURED_FROM = 10
"""The pipeline is full from here on; means over a run's steps begin here."""
MOST_SECONDS = 3600
FOR_THE_DEMO = {"vapo": ("algorithm.gae.length_alpha=0.5",)}
"""Settings that follow from the demo's lengths: with VAPO's own every lambda would be 0 up to 20 tokens."""


def read(run_dir: Path) -> dict[str, Any]:
    first = read_lines(run_dir / "evaluations.jsonl")[0]
    means = ("step_s", "staleness/mean", "clip_fraction", "mask_fraction", "grad_norm")
    return {"before": first["accuracy"]} | read_run(run_dir, MEASURED_FROM, means)


def print_table(measured: list[dict[str, Any]]) -> None:
    """One row per algorithm; accuracy as mean ± standard deviation over the seeds."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for line in measured:
        by_name.setdefault(line["algorithm"], []).append(line)
    before = mean(line["before"] for line in measured)
    print(
        f"\n{measured[0]['steps']} learner steps, {measured[0]['rows']} held-out rows, {before:.3f} before training\n"
    )
    print("| algorithm | held-out accuracy | gain | reward at the end | entropy at the end | clipped | s per step |")
    print("|---|---|---|---|---|---|---|")
    for name, lines in sorted(by_name.items(), key=lambda item: -mean(line["accuracy"] for line in item[1])):
        accuracy = [line["accuracy"] for line in lines]
        spread = f" ± {stdev(accuracy):.3f}" if len(lines) > 1 else ""
        gain = mean(line["accuracy"] - line["before"] for line in lines)
        cells = {key: mean(line[key] for line in lines) for key in ("reward_last_10", "entropy_last_10", "step_s")}
        print(
            f"| `{name}` | {mean(accuracy):.3f}{spread} ({len(lines)}) | {gain:+.3f} | {cells['reward_last_10']:.3f} "
            f"| {cells['entropy_last_10']:.3f} | {mean(line['clip_fraction'] for line in lines):.3f} "
            f"| {cells['step_s']:.2f} |"
        )


def in_the_demo() -> tuple[str, ...]:
    """All but those that need an environment, which the demo has none of."""
    of_turns = {name for name, method in methods("advantage").items() if "turns" in method.needs}
    return tuple(name for name in shipped_overlays("algorithms") if name not in of_turns)


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=tuple(shipped_overlays("algorithms")), default=in_the_demo())
    arguments = parser.parse_intermixed_args()
    wanted = [
        Run((("algorithm", name),), seed, ("evaluation.every_steps=0", name, *FOR_THE_DEMO.get(name, ())))
        for seed in arguments.seeds
        for name in arguments.algorithms
    ]
    make_table(arguments, wanted, read, print_table, MOST_SECONDS)


if __name__ == "__main__":
    main()
