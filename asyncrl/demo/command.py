"""The main job, end to end: data, model, warm start, asynchronous GRPO, and a check of the exported folder.

    asyncrl demo [--seed 1] [--folder runs/demo-1] [--steps 200] [--quick] [key=value ...]

Everything is written to one new folder. The last lines compare held-out accuracy before and after, and score the
export again with nothing but transformers. `--quick` makes everything small, and learns little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO, prepare, run
from asyncrl.errors import UserError


def next_folder() -> Path:
    number = 1
    while Path(f"runs/demo-{number}").exists():
        number += 1
    return Path(f"runs/demo-{number}")


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def check(changes: Sequence[str]) -> None:
    """Before minutes are spent on data and warm start."""
    config = load_config(GRPO, changes)
    if any(change.startswith("run_dir=") for change in changes) or not config.evaluation.before_training:
        raise UserError(
            "what the demo compares is in --folder: leave run_dir and evaluation.before_training as they are"
        )


def demo(folder: Path | None, seed: int, changes: Sequence[str], *, quick: bool = False) -> None:
    """Run all stages in a new folder, by default the next free one of runs. `changes`: of the GRPO run."""
    check(changes)
    folder = folder or next_folder()
    grpo = folder / "grpo"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    seconds = prepare(folder, seed, quick=quick)
    train = ["-m", "asyncrl", "train", str(folder / "config.yaml")]
    seconds["grpo"] = run("asynchronous GRPO (asyncrl train)", *train, *changes)
    score = ["-m", "asyncrl", "eval", str(grpo / "config.yaml"), "--model", str(grpo / "export")]
    seconds["check"] = run("the exported folder with plain transformers (asyncrl eval)", *score)
    before, *_, after = evaluations(grpo)
    metrics = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    first, last = metrics[:10], metrics[-10:]
    summary = {
        "seed": seed,
        "held_out_rows": before["rows"],
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "reward_first_10_steps": sum(m["reward/mean"] for m in first) / len(first),
        "reward_last_10_steps": sum(m["reward/mean"] for m in last) / len(last),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"\n== after {sum(seconds.values()):.0f} s ({', '.join(f'{k} {v:.0f}' for k, v in seconds.items())})")
    print(
        f"held-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f} ({before['rows']} rows of unseen scans)"
    )
    print(f"training reward   {summary['reward_first_10_steps']:.3f} -> {summary['reward_last_10_steps']:.3f}")
    print(f"model             {grpo / 'export'}")
