"""Where the digit task's errors come from: how often all digits are read right, and the answer given that they are.

    python -m benchmarks.digit_errors --data eval.parquet MODEL [MODEL ...]

Each model folder is decoded greedily with plain transformers, its first word forced to be `read`. Errors are standard
errors over rows. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from math import sqrt
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO
from asyncrl.demo.reward import answer, reading
from asyncrl.rewards.sample import RewardSample
from asyncrl.tools.evaluate import evaluate


def all_read(sample: RewardSample) -> float:
    """1.0 if every digit is read right."""
    return float(reading(sample) == 1.0)


def read_and_answered(sample: RewardSample) -> float:
    """1.0 if the answer is right, too."""
    return all_read(sample) * answer(sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="held-out rows, as asyncrl.demo.data writes them")
    parser.add_argument("models", type=Path, nargs="+")
    arguments = parser.parse_args()
    # The reward is the share of rows read right, the accuracy that of rows read and answered right: one pass for both.
    functions = [{"function": f"{__file__}:all_read"}, {"function": f"{__file__}:read_and_answered", "weight": 0.0}]
    print("| model | rows | digits read right | answer right given the digits |\n|---|---|---|---|")
    for model in arguments.models:
        overrides = [f"model.path={model}", f"data.val_files=[{arguments.data}]", "model.dtype=float32"]
        config = load_config(GRPO, overrides)
        reward = config.reward.model_validate({"functions": functions, "accuracy": "read_and_answered"})
        scores = evaluate(config.model_copy(update={"reward": reward}), model, prefix="read")
        read, given = scores.reward, scores.accuracy / scores.reward
        errors = sqrt(read * (1 - read) / scores.rows), sqrt(given * (1 - given) / (read * scores.rows))
        print(f"| {model} | {scores.rows} | {read:.3f} ± {errors[0]:.3f} | {given:.3f} ± {errors[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
