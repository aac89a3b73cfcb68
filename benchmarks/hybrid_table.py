"""Held-out accuracy on the digit task of reinforcement learning alone, imitation alone, and both at once.

    python -m benchmarks.hybrid_table --folder FOLDER [--methods grpo sft luffy] [--seeds 1 2 3] [--jobs 2] [--print]
        [key=value ...]

`sft` is CHORD with a mu of 1: the same demonstrations in the same steps by the same optimiser, with no other loss. The
hybrids have one demonstration in each group of 8 (uft: hints). Runs that are in FOLDER/runs.jsonl are skipped, so that
the table can be continued (benchmarks/demo_runs.py). Prints Markdown, best first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.algorithm_table import MOST_SECONDS, SEEDS, print_table, read
from benchmarks.demo_runs import DemoRuns, Run

METHODS: dict[str, tuple[str, ...]] = {
    "grpo": ("grpo",),
    "sft": ("chord_mu", *(f"algorithm.chord.{key}" for key in ("peak=1", "valley=1", "warmup_steps=0"))),
    **{name: (name,) for name in ("chord_mu", "chord_phi", "luffy", "uft", "hpt", "srft")},
}
"""Overlays and overrides of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="results and logs")
    parser.add_argument("--warm-starts", type=Path, default=None, help="seed-N of benchmarks/demo_seeds.py")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--print", action="store_true", help="only print what has been measured")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    arguments = parser.parse_intermixed_args()
    runs = DemoRuns(arguments.folder, arguments.warm_starts, arguments.overrides, MOST_SECONDS)
    if not arguments.print:
        wanted = [
            Run((("algorithm", name),), seed, ("evaluation.every_steps=0", *METHODS[name]))
            for seed in arguments.seeds
            for name in arguments.methods
        ]
        runs.make(wanted, arguments.jobs, read)
    if runs.measured():
        print_table(runs.measured())


if __name__ == "__main__":
    main()
