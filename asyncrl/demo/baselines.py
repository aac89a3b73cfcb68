"""Held-out accuracy of the warm start by each way of decoding. A run has learnt what it gains on the best of them.

    python -m asyncrl.demo.baselines --folder FOLDER [--export] [key=value ...]

Greedy, sampled as in training, and greedy with each first word that a demonstration has: a policy that has only changed
its first word looks better by greedy decoding, and has learnt nothing else. Writes FOLDER/baselines.json.
`--export` scores the model that the run has exported, by greedy decoding alone, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq

from asyncrl.config.load import load_config
from asyncrl.launch.command import command

BASELINES = "baselines.json"


def first_words(rows: Path) -> list[str]:
    """Words with which the demonstrations in a Parquet file begin, sorted; no numbers. Empty without demonstrations."""
    if "target" not in pq.read_schema(rows).names:
        return []
    words = {target.split()[0] for target in pq.read_table(rows, columns=["target"])["target"].to_pylist()}
    return sorted(word for word in words if word.isalpha())


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="as asyncrl.demo.prepare has left it")
    parser.add_argument("--export", action="store_true", help="score FOLDER/grpo/export")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the GRPO run's configuration")
    arguments = parser.parse_intermixed_args(argv)
    folder: Path = arguments.folder
    # Not before --help: they take seconds.
    from transformers.utils.logging import disable_progress_bar

    from asyncrl.demo.scoring import evaluate, scores_line

    disable_progress_bar()
    if arguments.export:
        run = folder / "grpo"
        config = load_config(run / "config.yaml", arguments.overrides)
        scores = evaluate(config, run / "export")
        print(scores_line(scores, config.evaluation.group_size, config.reward.accuracy_component))
        return 0
    config = load_config(folder / "config.yaml", arguments.overrides)
    temperature = config.rollout.temperature
    decodings = [("greedy", 0.0, ""), (f"sampled at temperature {temperature:g}", temperature, "")]
    decodings += [(f"greedy, first word `{word}`", 0.0, word) for word in first_words(folder / "data" / "rl.parquet")]
    found = {}
    for name, value, prefix in decodings:
        decoded = config.evaluation.model_copy(update={"temperature": value})
        scores = evaluate(config.model_copy(update={"evaluation": decoded}), Path(config.model.path), prefix=prefix)
        found[name] = asdict(scores)
        print(f"{name:<32}{scores.accuracy:.3f} ± {scores.accuracy_error:.3f}", flush=True)
    (folder / BASELINES).write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
