"""The demo of handwritten digits, end to end: data, a warm start, its scores, training, a check of the export.

    asyncrl demo digits [ALGORITHM] [--seed 1] [--folder DIR] [--steps 200] [--from-scratch] [--quick] [key=value ...]

ALGORITHM is an overlay such as rloo (docs/algorithms.md); without one it is GRPO with a clip of
0.2 and 0.28 and a mean over tokens, and not yet the overlay `grpo`. Everything is written to one new
folder. The last lines compare held-out accuracy of the warm start, by each way of
decoding, with that of the run halfway and at its end; the line before them scores the export again with nothing but
transformers. Both are `asyncrl eval`'s: without it the start is scored by the run alone. `--quick` makes everything
small, and learns little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import hypot
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.demo.choice import DemoRequest
from asyncrl.demo.prepare import GRPO, check_parts, prepare, run
from asyncrl.errors import UserError, pasted
from asyncrl.plugins import installed, what_to_install
from asyncrl.telemetry.jsonl import read_lines

BASELINES = "baselines.json"
"""Scores of the start, by name of the decoding."""


def demo(request: DemoRequest) -> None:
    """Run all stages in a new folder."""
    check_changes(GRPO, request.changes)
    check_parts(from_scratch=request.from_scratch)
    folder = request.new_folder
    seconds = prepare(folder, request.seed, from_scratch=request.from_scratch, quick=request.quick)
    check = ["-m", "asyncrl", "eval", str(folder / "grpo" / "config.yaml"), "--model", str(folder / "grpo" / "export")]
    train_and_compare(folder, request, seconds, held_out="rows of unseen scans", check=check)


def train_and_compare(
    folder: Path, request: DemoRequest, seconds: dict[str, float], *, held_out: str, check: Sequence[str]
) -> None:
    """Score the start of FOLDER/config.yaml by each decoding, train it, check the export and say what was gained.

    `held_out`: words for the rows. `check`: arguments of Python for the stage that scores the export. Without `asyncrl
    eval` only the run's own evaluations are compared."""
    grpo, config = folder / "grpo", [str(folder / "config.yaml"), *request.changes]
    if scores := "eval" in installed("commands"):
        score = [*config, "--model", load_config(folder / "config.yaml").model.path, "--decodings"]
        title = "the start with plain transformers, by each decoding (asyncrl eval)"
        seconds["baselines"] = run(title, "-m", "asyncrl", "eval", *score, str(folder / BASELINES))
    else:
        alone = "the start is scored by the run alone, and the export is not: `asyncrl eval` is not installed"
        print(f"\n{alone}. {what_to_install('commands')}")
    seconds["grpo"] = run("asynchronous reinforcement learning (asyncrl train)", "-m", "asyncrl", "train", *config)
    if scores:
        seconds["check"] = run("the exported folder with plain transformers", *check)
    summary = summarise(folder, request.seed, seconds)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print(f"\n{table(summary, held_out)}\nmodel {grpo / 'export'}")
    print(f"what it writes: asyncrl inspect {pasted(grpo)} --web\na page about it: asyncrl report {pasted(grpo)}")


def check_changes(file: Path, changes: Sequence[str]) -> None:
    """Check the settings of a demo's configuration before minutes are spent on data and warm start."""
    config = load_config(file, changes)
    if any(change.startswith(("run_dir=", "model.path=")) for change in changes):
        raise UserError("the demo's run and its warm start are in --folder: leave run_dir and model.path as they are")
    if not config.evaluation.before_training:
        raise UserError("the demo compares before and after: leave evaluation.before_training as it is")


def summarise(folder: Path, seed: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Held-out accuracy and its standard error by decoding and by step, training reward, and seconds by stage."""
    evaluations, metrics = (read_lines(folder / "grpo" / name) for name in ("evaluations.jsonl", "metrics.jsonl"))
    first, last = evaluations[0], evaluations[-1]
    file = folder / BASELINES
    baselines = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"greedy": first}
    halfway = min(evaluations, key=lambda evaluation: abs(evaluation["step"] - last["step"] / 2))
    shown = [halfway, last] if first["step"] < halfway["step"] < last["step"] else [last]
    rewards = [step["reward/mean"] for step in metrics]
    ends = min(10, -(-len(rewards) // 2))  # of a short run: its two halves
    best = max(baselines.values(), key=lambda scores: scores["accuracy"])
    return {
        "seed": seed,
        "held_out_rows": last["rows"],
        "warm_start": {name: _accuracy(scores) for name, scores in baselines.items()},
        "after_steps": {scores["step"]: _accuracy(scores) for scores in shown},
        "gain_over_best_decoding": {
            "accuracy": last["accuracy"] - best["accuracy"],
            "error": hypot(last["accuracy_error"], best["accuracy_error"]),
        },
        "reward_first_steps": sum(rewards[:ends]) / ends,
        "reward_last_steps": sum(rewards[-ends:]) / ends,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def _accuracy(scores: Mapping[str, Any]) -> dict[str, float]:
    return {"accuracy": scores["accuracy"], "error": scores["accuracy_error"]}


def table(summary: Mapping[str, Any], held_out: str) -> str:
    """The summary as text; `held_out`: words for the rows."""
    rows = [(f"start, {name}", scores) for name, scores in summary["warm_start"].items()]
    rows += [(f"after {step} steps, greedy", scores) for step, scores in summary["after_steps"].items()]
    gain, seconds = summary["gain_over_best_decoding"], summary["seconds"]
    return "\n".join(
        [
            f"held-out accuracy ± standard error, {summary['held_out_rows']} {held_out}",
            *(f"  {name:<44}{scores['accuracy']:.3f} ± {scores['error']:.3f}" for name, scores in rows),
            f"  {'gain over the best of the start':<43}{gain['accuracy']:+.3f} ± {gain['error']:.3f}",
            f"training reward {summary['reward_first_steps']:.3f} -> {summary['reward_last_steps']:.3f}",
            f"{sum(seconds.values()):.0f} s: {', '.join(f'{name} {value:.0f}' for name, value in seconds.items())}",
        ]
    )
