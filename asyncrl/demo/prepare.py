"""What the digit task needs before reinforcement learning: data, a small model, and a supervised warm start.

    python -m asyncrl.demo.prepare --folder runs/digits [--seed 1] [--quick]

Writes FOLDER/data, FOLDER/model, FOLDER/sft, and FOLDER/config.yaml, which `asyncrl train` can begin with at once.
`--quick` makes everything so small that it is done in half a minute and learns little: to see that all parts work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from asyncrl.config.load import dump_config, load_config

SFT, GRPO = (Path(__file__).parent / name for name in ("sft.yaml", "grpo.yaml"))
QUICK_ROWS = ("--sft-rows", "256", "--rl-rows", "256", "--eval-rows", "32")
QUICK_MODEL = ("--hidden", "64", "--intermediate", "128", "--layers", "2", "--vision-dim", "32", "--vision-depth", "1")
QUICK_STEPS = "trainer.max_steps=150", "trainer.save_freq=20", "evaluation.every_steps=50", "batch.prompts_per_step=8"


def run(title: str, *command: str) -> float:
    """Run one stage in the foreground; returns its seconds. A failing stage ends this process with its exit code."""
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    code = subprocess.call([sys.executable, *command])
    if code:
        sys.exit(code)
    return time.monotonic() - started


def prepare(folder: Path, seed: int, *, quick: bool = False) -> dict[str, float]:
    """Seconds by stage."""
    rows, size = (QUICK_ROWS, (*QUICK_MODEL, "--vision-heads", "2")) if quick else ((), ())
    out, seeded = ("--out", str(folder / "data")), ("--seed", str(seed))
    seconds = {"data": run("handwritten digits", "-m", "asyncrl.demo.data", *out, *seeded, *rows)}
    out = ("--out", str(folder / "model"))
    seconds["model"] = run("a small Qwen2-VL", "-m", "asyncrl.demo.model", *out, *seeded, *size)
    seconds["sft"] = run(
        "supervised warm start (asyncrl sft)",
        *("-m", "asyncrl", "sft", str(SFT)),
        *(f"run_dir={folder}/sft", f"model.path={folder}/model", f"trainer.seed={seed}"),
        *(f"data.train_files=[{folder}/data/sft.parquet]", f"data.val_files=[{folder}/data/eval.parquet]"),
        *(("sft.steps=30",) if quick else ()),
    )
    config = load_config(
        GRPO,
        [
            *(f"run_dir={folder}/grpo", f"model.path={folder}/sft/export", f"trainer.seed={seed}"),
            *(f"data.train_files=[{folder}/data/rl.parquet]", f"data.val_files=[{folder}/data/eval.parquet]"),
            *(QUICK_STEPS if quick else ()),
        ],
    )
    (folder / "config.yaml").write_text(dump_config(config))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of data, model, order and sampling")
    parser.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.seed, quick=arguments.quick)


if __name__ == "__main__":
    main()
