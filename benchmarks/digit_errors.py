"""Error sources of the digit task: how often all digits are read right, and the answer given that they are.

    python -m benchmarks.digit_errors --data eval.parquet [--by kind] MODEL [MODEL ...]

Each model folder is decoded greedily with plain transformers, its first word forced to be `read`. The rows that a model
reads right are its own, and those that training adds may be harder to compute with: the last column is over rows that
it and the first model both read right, as a difference of the two. `--by` names a column: a line for each of its
values, too. Errors are standard errors over rows. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from math import sqrt
from pathlib import Path

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO
from asyncrl.demo.reward import answer, reading
from asyncrl_plugins.evaluation.plain_scores import complete_held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="held-out rows, as asyncrl.demo.data writes them")
    parser.add_argument("--by", default="", help="column of the rows, such as `kind` of the question")
    parser.add_argument("models", type=Path, nargs="+", help="the first is what the others are compared with")
    arguments = parser.parse_args()
    print(
        "| model | rows | digits read right | answer right given the digits | read right by the first, too "
        "| answer there, minus the first's |\n|---|---|---|---|---|---|"
    )
    first: tuple[np.ndarray, np.ndarray] | None = None
    for model in arguments.models:
        overrides = [f"model.path={model}", f"data.val_files=[{arguments.data}]", "model.dtype=float32"]
        samples = complete_held_out(load_config(GRPO, overrides), model, "read")
        read = np.array([reading(sample) == 1.0 for sample in samples])
        right = np.array([answer(sample) == 1.0 for sample in samples])
        first = first or (read, right)
        kinds = np.array([sample.columns[arguments.by] if arguments.by else "" for sample in samples])
        parts = {str(model): np.full(len(samples), True)}
        if arguments.by:
            parts |= {f"{model}, {kind}": kinds == kind for kind in sorted(set(kinds))}
        for name, rows in parts.items():
            both = rows & read & first[0]
            change = right[both].astype(float) - first[1][both]
            cells = [share(read[rows]), share(right[rows & read]), str(both.sum())]
            print(f"| {name} | {rows.sum()} | {' | '.join(cells)} | {change.mean():+.3f} ± {error(change):.3f} |")


def share(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ± {error(values):.3f}"


def error(values: np.ndarray) -> float:
    return float(values.std()) / sqrt(max(len(values), 1))


if __name__ == "__main__":
    main()
