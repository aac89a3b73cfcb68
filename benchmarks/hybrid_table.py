"""Held-out accuracy on the digit task of reinforcement learning alone, imitation alone, and both at once.

    python -m benchmarks.hybrid_table --folder FOLDER [--methods grpo sft luffy] [--seeds 1 2 3] [--jobs 2] [--print]
        [key=value ...]

`sft` is CHORD with a mu of 1: the same demonstrations in the same steps by the same optimiser, with no other loss. The
hybrids have one demonstration in each group of 8 (uft: hints). Runs that are in FOLDER/runs.jsonl are skipped, so that
the table can be continued (benchmarks/demo_runs.py). Prints Markdown, best first.
"""

from __future__ import annotations

from benchmarks.algorithm_table import MOST_SECONDS, print_table, read
from benchmarks.demo_runs import Run, make_table, table_parser

METHODS: dict[str, tuple[str, ...]] = {
    "grpo": ("grpo",),
    "sft": ("chord_mu", *(f"algorithm.chord_mu.{key}" for key in ("peak=1", "valley=1", "warmup_steps=0"))),
    **{name: (name,) for name in ("chord_mu", "chord_phi", "luffy", "uft", "hpt", "srft")},
}
"""Overlays and overrides of each."""


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    arguments = parser.parse_intermixed_args()
    wanted = [
        Run((("algorithm", name),), seed, ("evaluation.every_steps=0", *METHODS[name]))
        for seed in arguments.seeds
        for name in arguments.methods
    ]
    make_table(arguments, wanted, read, print_table, MOST_SECONDS)


if __name__ == "__main__":
    main()
