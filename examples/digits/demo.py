"""The main job, end to end: data, model, warm start, asynchronous GRPO, and a check of the exported folder.

    python examples/digits/demo.py [--seed 1] [--folder runs/demo-1] [--steps 200]

Everything is written to one new folder. The last lines compare held-out accuracy before and after, and score the
export again with nothing but transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "configs"


def run(title: str, *command: str) -> float:
    """Run one stage in the foreground; returns its seconds. A failing stage ends the demo with its exit code."""
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    code = subprocess.call([sys.executable, *command])
    if code:
        sys.exit(code)
    return time.monotonic() - started


def next_folder() -> Path:
    number = 1
    while Path(f"runs/demo-{number}").exists():
        number += 1
    return Path(f"runs/demo-{number}")


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of data, model, order and sampling")
    parser.add_argument("--folder", type=Path, default=None, help="new folder; default: the next free runs/demo-N")
    parser.add_argument("--steps", type=int, default=0, help="GRPO steps; default: the configuration's")
    arguments = parser.parse_args()
    folder: Path = arguments.folder or next_folder()
    seed = str(arguments.seed)
    data = [f"data.train_files=[{folder}/data/rl.parquet]", f"data.val_files=[{folder}/data/eval.parquet]"]
    sft, grpo = folder / "sft", folder / "grpo"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    seconds = {
        "data": run("handwritten digits", str(HERE / "make_data.py"), "--out", str(folder / "data"), "--seed", seed),
        "model": run("a small Qwen2-VL", str(HERE / "make_model.py"), "--out", str(folder / "model"), "--seed", seed),
        "sft": run(
            "supervised warm start (asyncrl sft)",
            *("-m", "asyncrl", "sft", str(CONFIGS / "digits_sft.yaml")),
            *(f"run_dir={sft}", f"model.path={folder}/model", f"trainer.seed={seed}"),
            *(f"data.train_files=[{folder}/data/sft.parquet]", data[1]),
        ),
    }
    steps = [f"trainer.max_steps={arguments.steps}"] if arguments.steps else []
    train = ["-m", "asyncrl", "train", str(CONFIGS / "digits_grpo.yaml")]
    overrides = [f"run_dir={grpo}", f"model.path={sft}/export", f"trainer.seed={seed}", *data, *steps]
    seconds["grpo"] = run("asynchronous GRPO (asyncrl train)", *train, *overrides)
    check = ["-m", "asyncrl", "eval", str(grpo / "config.yaml"), "--model", str(grpo / "export")]
    seconds["check"] = run("the exported folder with plain transformers (asyncrl eval)", *check)
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
