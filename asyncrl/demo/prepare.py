"""Inputs of the demo's reinforcement learning: data, and a warm start that ships with it or is trained.

    python -m asyncrl.demo.prepare --folder runs/digits [--seed 1] [--from-scratch] [--quick]

Writes FOLDER/data, FOLDER/warm_start, and FOLDER/config.yaml, which `asyncrl train` can begin with at once.
`--from-scratch` makes the warm start, too, in FOLDER/model and FOLDER/sft. `--quick` makes everything so small that it
is done in half a minute and learns little: to see that all parts work.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import dump_config, load_config
from asyncrl.errors import UserError
from asyncrl.launch.command import command
from asyncrl.plugins import installed, what_to_install

SFT, GRPO, WARM_START = (Path(__file__).parent / name for name in ("sft.yaml", "grpo.yaml", "warm_start"))
QUICK_MODEL = ("--hidden", "64", "--intermediate", "128", "--layers", "2", "--vision-dim", "32", "--vision-depth", "1")
QUICK_STEPS = "trainer.max_steps=150", "trainer.save_freq=20", "evaluation.every_steps=50", "batch.prompts_per_step=8"


def check_parts(*, from_scratch: bool) -> None:
    """Refuse to begin without what the stages need."""
    if importlib.util.find_spec("sklearn") is None:
        raise UserError(
            "the demo draws the handwritten digits of scikit-learn, which is not installed here: it belongs to the "
            "extra `demo` (pip install 'asyncrl[demo]'), or pip install scikit-learn"
        )
    if from_scratch and "sft" not in installed("commands"):
        raise UserError(
            f"--from-scratch trains by `asyncrl sft`, which is not installed here. {what_to_install('commands')}"
        )
    if not from_scratch and not (WARM_START / "config.json").is_file():
        raise UserError(f"there is no warm start in {WARM_START}. --from-scratch makes one, in some minutes")


def run(title: str, *command: str) -> float:
    """Run one stage in the foreground; returns its seconds. A failing stage ends this process with its exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take the other service's core
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # models are small and local
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    code = subprocess.call([sys.executable, *command])
    if code:
        sys.exit(code)
    return time.monotonic() - started


def prepare(folder: Path, seed: int, *, from_scratch: bool = False, quick: bool = False) -> dict[str, float]:
    """Seconds by stage. Raises UserError where a part is missing."""
    check_parts(from_scratch=from_scratch)
    rows = ["--rl-rows", "256", "--eval-rows", "32"] if quick else []
    rows += (["--sft-rows", "256"] if quick else []) if from_scratch else ["--sft-rows", "0"]
    data = ["-m", "asyncrl.demo.data", "--out", str(folder / "data"), "--seed", str(seed), *rows]
    seconds = {"data": run("handwritten digits", *data)}
    if from_scratch:
        seconds |= make_warm_start(folder, seed, quick=quick)
    shutil.copytree(folder / "sft" / "export" if from_scratch else WARM_START, folder / "warm_start")
    write_config(folder, GRPO, "warm_start", seed, QUICK_STEPS if quick else ())
    return seconds


def write_config(folder: Path, shipped: Path, start: str, seed: int, changes: Sequence[str] = ()) -> None:
    """Write FOLDER/config.yaml: the `shipped` one for the rows of FOLDER/data and the model in FOLDER/START."""
    own = [
        *(f"run_dir={folder}/grpo", f"model.path={folder}/{start}", f"trainer.seed={seed}"),
        *(f"data.train_files=[{folder}/data/rl.parquet]", f"data.val_files=[{folder}/data/eval.parquet]"),
    ]
    (folder / "config.yaml").write_text(dump_config(load_config(shipped, [*own, *changes])), encoding="utf-8")


def make_warm_start(folder: Path, seed: int, *, quick: bool = False) -> dict[str, float]:
    """Make a model and train it on FOLDER/data: FOLDER/sft/export. Seconds by stage."""
    size = (*QUICK_MODEL, "--vision-heads", "2") if quick else ()
    model = ["-m", "asyncrl.demo.model", "--out", str(folder / "model"), "--seed", str(seed), *size]
    seconds = {"model": run("a small Qwen2-VL", *model)}
    seconds["sft"] = run(
        "supervised warm start (asyncrl sft)",
        *("-m", "asyncrl", "sft", str(SFT)),
        *(f"run_dir={folder}/sft", f"model.path={folder}/model", f"trainer.seed={seed}"),
        *(f"data.train_files=[{folder}/data/sft.parquet]", f"data.val_files=[{folder}/data/eval.parquet]"),
        *(("sft.steps=10", "sft.rows_per_step=16") if quick else ()),
    )
    return seconds


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of data, model, order and sampling")
    parser.add_argument("--from-scratch", action="store_true", help="make the warm start, too")
    parser.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    arguments = parser.parse_args(argv)
    prepare(arguments.folder, arguments.seed, from_scratch=arguments.from_scratch, quick=arguments.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
