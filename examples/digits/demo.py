"""The main job, end to end: data, model, warm start, asynchronous GRPO, and a check of the exported folder.

    python examples/digits/demo.py [--seed 1] [--folder runs/demo-1] [--steps 200] [--quick] [key=value ...]

Everything is written to one new folder. The last lines compare held-out accuracy before and after, and score the
export again with nothing but transformers. `--quick` makes everything small, and learns little.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from prepare import CONFIGS, prepare, run

from asyncrl.config.load import load_config
from asyncrl.errors import UserError


def next_folder() -> Path:
    number = 1
    while Path(f"runs/demo-{number}").exists():
        number += 1
    return Path(f"runs/demo-{number}")


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def check(parser: argparse.ArgumentParser, changes: list[str]) -> None:
    """Before minutes are spent on data and warm start."""
    try:
        config = load_config(CONFIGS / "digits_grpo.yaml", changes)
    except UserError as error:
        parser.error(str(error))
    if any(change.startswith("run_dir=") for change in changes) or not config.evaluation.before_training:
        parser.error("what the demo compares is in --folder: leave run_dir and evaluation.before_training as they are")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of data, model, order and sampling")
    parser.add_argument("--folder", type=Path, default=None, help="new folder; default: the next free runs/demo-N")
    parser.add_argument("--steps", type=int, default=0, help="GRPO steps; default: the configuration's")
    parser.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the GRPO run's configuration")
    arguments = parser.parse_intermixed_args()
    changes = [*([f"trainer.max_steps={arguments.steps}"] if arguments.steps else []), *arguments.overrides]
    check(parser, changes)
    folder: Path = arguments.folder or next_folder()
    grpo = folder / "grpo"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    seconds = prepare(folder, arguments.seed, quick=arguments.quick)
    train = ["-m", "asyncrl", "train", str(folder / "config.yaml")]
    seconds["grpo"] = run("asynchronous GRPO (asyncrl train)", *train, *changes)
    score = ["-m", "asyncrl", "eval", str(grpo / "config.yaml"), "--model", str(grpo / "export")]
    seconds["check"] = run("the exported folder with plain transformers (asyncrl eval)", *score)
    before, *_, after = evaluations(grpo)
    metrics = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    first, last = metrics[:10], metrics[-10:]
    summary = {
        "seed": arguments.seed,
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


if __name__ == "__main__":
    main()
