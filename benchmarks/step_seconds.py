"""Seconds of a training step under other settings, or of another checkout, in turn: medians over repeats.

    python -m benchmarks.step_seconds CONFIG --runs "float32: model.dtype=float32" "bfloat16: model.dtype=bfloat16"
        [--before FOLDER] [--repeats 3] [--steps 6]

Each run is `asyncrl train CONFIG` with these words of the configuration, at a learning rate so small that completions
keep their lengths; steps in which the pipeline fills or empties do not count. `--before` is a checkout of an earlier
state, which makes the first run, too. `--bare` adds the learner's micro-batches as plain torch computes them: the
model's two passes and AdamW, with two threads and nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from asyncrl.telemetry.jsonl import read_lines
from benchmarks.against_trl import ROOT, UNATTENDED

WARM_UP = 2
ALWAYS = (
    *("trainer.save_freq=0", "learner.optim.lr=1e-7"),
    *(f"{key}={value}" for key, value in UNATTENDED.items()),
)


def run(checkout: Path, config: Path, words: list[str], folder: Path, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step and of its training, and the mean length of completions."""
    all_words = [f"run_dir={folder}", f"trainer.max_steps={steps + WARM_UP + 1}", *ALWAYS, *words]
    command = [sys.executable, "-m", "asyncrl", "train", str(config), *all_words]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = read_lines(folder / "metrics.jsonl")[WARM_UP:-1]
    step, learn, length = ([line[name] for line in lines] for name in ("step_s", "learn_s", "response_length/mean"))
    return median(step), median(learn), sum(length) / len(length)


def bare(run_dir: Path, steps: int) -> float:
    """Wall seconds of plain torch with two threads over the batches of a run."""
    command = [sys.executable, "-m", "benchmarks.peer.bare_loop", str(run_dir), "--steps", str(steps), "--threads", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout)["bare"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME: key=value ...")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier state")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bare", action="store_true")
    arguments = parser.parse_args()
    runs = [(name.strip(), ROOT, words.split()) for name, _, words in (run.partition(":") for run in arguments.runs)]
    if arguments.before:
        runs.insert(0, (f"before: {runs[0][0]}", arguments.before.absolute(), runs[0][2]))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name, *_ in runs}
    plain: list[float] = []
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-steps-"))
    for repeat in range(arguments.repeats):
        for name, checkout, words in runs:
            run_dir = folder / f"{repeat}-{len(found[name])}-{name.replace(' ', '-')}"
            found[name].append(run(checkout, arguments.config.absolute(), words, run_dir, arguments.steps))
            print(f"{repeat + 1}: {name}: {found[name][-1][0]:.2f} s a step", file=sys.stderr, flush=True)
            if arguments.bare and name == runs[-1][0]:
                plain.append(bare(run_dir, min(4, arguments.steps)))
    first = median(step for step, *_ in found[runs[0][0]])
    print(f"{len(os.sched_getaffinity(0))} cores, medians of {arguments.repeats} runs\n")
    print(
        "| run | a step, s | of the first | training, s | tokens a completion | each run |\n|---|---|---|---|---|---|"
    )
    for name, results in found.items():
        step, learn, length = (median(column) for column in zip(*results, strict=True))
        each = ", ".join(f"{one[0]:.2f}" for one in results)
        print(f"| {name} | {step:.2f} | {step / first:.2f} | {learn:.2f} | {length:.1f} | {each} |")
    if plain:
        print(f"| plain torch, two threads, training alone, {runs[-1][0]} | {median(plain):.2f} | | | | |")


if __name__ == "__main__":
    main()
