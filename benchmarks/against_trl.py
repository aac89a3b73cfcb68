"""Samples per second beside TRL's GRPOTrainer: the same model, rows, reward, batch, learning rate, loss and cores.

    python -m benchmarks.against_trl --model FOLDER --data rl.parquet [--trl-python PATH] [--profiles demo ...]

Both sides train from the same weights on the same rows in the same order, in turn, one after the other on the same
cores; the side that begins changes from round to round. Ours is `asyncrl train` as it is: two processes, the hf engine,
at most 2 versions of staleness, verified and journaled. TRL's is its trainer with transformers' generation, which
takes turns with training in one process. Three profiles of lengths: the model's own (`demo`), and two laws that its
weights are set to (`64 tokens`, `heavy tails`; benchmarks/peer/length_laws.py), so that neither side has to be made to
end.

Time is from the end of one step to the end of the next, without start-up and the first steps. Our runs are a few steps
longer, which do not count: in a run's last steps nothing is generated any more. Every round is kept in --folder: a
later call adds rounds to it, and the tables are of all. TRL has to be beside asyncrl: pip install 'asyncrl[trl]', here
or in an environment whose Python is --trl-python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import yaml

import asyncrl.demo
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_dtype
from asyncrl.telemetry.jsonl import read_lines
from benchmarks.peer.length_laws import LAWS, REWARD, make_model

ROOT = Path(__file__).parent.parent
CONFIG = Path(asyncrl.demo.__file__).parent / "grpo.yaml"
DEMO = "demo"
PROFILES = (DEMO, *LAWS)
OURS, THEIRS = "asyncrl", "TRL"
UNATTENDED = {
    "evaluation.every_steps": "0",
    "evaluation.before_training": "false",
    "network.control_port": "0",
    "network.weights_port": "0",
    "telemetry.learner_port": "0",
    "telemetry.rollout_port": "0",
}
"""Settings of runs that are measured: nothing is evaluated, and ports are free ones."""
WARM_UP = 3
"""Steps left out at the beginning: engines warm up, the pipeline fills."""
LAW_LR = 1e-5
"""Learning rate of both sides for the laws of lengths: at the demo's 1e-4 they would be forgotten within ten steps."""
ROWS_AT_ONCE = {DEMO: 64, "64 tokens": 32, "heavy tails": 16}
"""Completions in one of TRL's forward and backward passes: fewer where padding makes them long. Not tuned further."""


def prepare(profile: str, arguments: argparse.Namespace) -> RunConfig:
    """Make the profile's model and rows in its folder, once, and return the configuration of both sides."""
    folder: Path = arguments.folder / profile.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    rows, model = folder / "rows.parquet", folder / "model"
    base = load_config(arguments.config, [])
    steps = arguments.steps + base.learner.max_staleness + 1
    if not rows.is_file():
        pq.write_table(pq.read_table(arguments.data).slice(0, steps * base.batch.prompts_per_step), rows)
    settings: dict[str, Any] = {
        "model.path": str(arguments.model),
        "data.train_files": [str(rows)],
        "data.val_files": [],
        "data.shuffle": False,
        "trainer.max_steps": steps,
        "trainer.save_freq": 0,
        **UNATTENDED,
    }
    if profile != DEMO:
        law = LAWS[profile]
        settings |= {"data.max_response_length": law.longest, "reward.functions": [REWARD]}
        settings["learner.optim.lr"] = LAW_LR
        if not (model / "config.json").is_file():
            make_model(arguments.model, law, model)
        settings["model.path"] = str(model)
    changed = dict(change.split("=", 1) for change in arguments.overrides)
    return resolved(arguments.config, settings | changed, folder)


def resolved(base: Path, settings: dict[str, Any], folder: Path) -> RunConfig:
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return resolve_dtype(load_config(base, [*words, f"run_dir={folder}"]))


def run_ours(config: RunConfig, folder: Path) -> dict[str, list[float]]:
    """Run `asyncrl train`. Returns seconds, mean reward and mean number of tokens of each step."""
    command = [sys.executable, "-m", "asyncrl", "train", str(write(config, folder))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = read_lines(folder / "metrics.jsonl")
    began = lines[0]["time"] - lines[0]["step_s"]
    ends = [began, *(line["time"] for line in lines)]
    return {
        "seconds": [after - before for before, after in pairwise(ends)],
        "rewards": [line["reward/mean"] for line in lines],
        "tokens": [line["response_length/mean"] for line in lines],
        **{name: [line[name] for line in lines] for name in ("wait_s", "learn_s", "publish_s")},
    }


def run_theirs(config: RunConfig, folder: Path, python: str, steps: int, rows_at_once: int) -> dict[str, list[float]]:
    """Run TRL's trainer. Returns the same of each step."""
    folder.mkdir(parents=True)
    record = folder / "record.json"
    module = [python, "-W", "ignore", "-m", "benchmarks.peer.trl_run", str(write(config, folder))]
    options = ["--steps", str(steps), "--rows-at-once", str(rows_at_once), "--out", str(record)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run([*module, *options], cwd=ROOT, env=environment, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"TRL's run failed; the end of {log.name}:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return json.loads(record.read_text())


def write(config: RunConfig, folder: Path) -> Path:
    """Write the configuration of a run beside its folder."""
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json") | {"run_dir": str(folder)}))
    return path


def one_round(profile: str, number: int, config: RunConfig, arguments: argparse.Namespace) -> None:
    """Run both sides, and add the round to the folder's record."""
    folder = Path(config.run_dir)
    sides = {
        OURS: lambda: run_ours(config, folder / f"ours-{number}"),
        THEIRS: lambda: run_theirs(
            config, folder / f"trl-{number}", arguments.trl_python, arguments.steps, rows_at_once(profile, arguments)
        ),
    }
    order = list(sides) if number % 2 else list(reversed(sides))
    found = {side: sides[side]() for side in order}
    with (arguments.folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({"profile": profile, "round": number, "load": os.getloadavg()[0], **found}) + "\n")


def rows_at_once(profile: str, arguments: argparse.Namespace) -> int:
    return arguments.rows_at_once or ROWS_AT_ONCE[profile]


def rate(side: dict[str, list[float]], config: RunConfig, steps: int) -> float:
    """Samples per second after the warm-up."""
    seconds = timed(side["seconds"], steps)
    return len(seconds) * config.batch.prompts_per_step * config.batch.group_size / sum(seconds)


def timed(values: Sequence[float], steps: int) -> Sequence[float]:
    return values[WARM_UP:steps]


def report(rounds: list[dict[str, Any]], configs: dict[str, RunConfig]) -> None:
    """Print the tables of all rounds."""
    print(f"\n{len(os.sched_getaffinity(0))} cores; samples/s\n")
    print("| lengths | round | tokens asyncrl | tokens TRL | asyncrl | TRL | ratio | load |")
    print("|---|---|---|---|---|---|---|---|")
    for profile, config in configs.items():
        mine = [one for one in rounds if one["profile"] == profile]
        table: list[list[float]] = []
        for one in mine:
            ours, theirs = one[OURS], one[THEIRS]
            steps = len(theirs["seconds"])
            rates = rate(ours, config, steps), rate(theirs, config, steps)
            tokens = [sum(kept) / len(kept) for kept in (timed(side["tokens"], steps) for side in (ours, theirs))]
            table.append([*tokens, *rates, rates[0] / rates[1]])
            print(f"| {profile} | {one['round']} | {cells(table[-1])} | {one['load']:.1f} |")
        if mine:
            print(f"| {profile} | **median** | {cells([median(column) for column in zip(*table, strict=True)])} | |")
    for profile in configs:
        mine = [one for one in rounds if one["profile"] == profile]
        if mine:
            curves(profile, mine)


def cells(values: Sequence[float]) -> str:
    *rates, ratio = values
    return " | ".join([*(f"{value:.1f}" for value in rates), f"{ratio:.2f}"])


def curves(profile: str, mine: list[dict[str, Any]]) -> None:
    """Print reward and seconds of each step, medians over the rounds."""
    print(f"\n{profile}: each step, {'median of ' if len(mine) > 1 else ''}{len(mine)} rounds\n")
    print("| step | reward asyncrl | reward TRL | s asyncrl | s TRL |\n|---|---|---|---|---|")
    for step in range(min(len(one[THEIRS]["seconds"]) for one in mine)):
        values = [
            median(one[side][name][step] for one in mine) for name in ("rewards", "seconds") for side in (OURS, THEIRS)
        ]
        print(f"| {step + 1} | " + " | ".join(f"{value:.3f}" for value in values) + " |")


def bare_loops(configs: dict[str, RunConfig], rounds: list[dict[str, Any]]) -> None:
    """Print what a bare loop takes on the batches of each profile's last run of ours."""
    print("\n| lengths | learn, CPU s | publish | bare loop | framework |\n|---|---|---|---|---|")
    for profile, config in configs.items():
        last = max((one["round"] for one in rounds if one["profile"] == profile), default=None)
        if last is None:
            continue
        run_dir = Path(config.run_dir) / f"ours-{last}"
        command = [
            sys.executable,
            "-m",
            "benchmarks.peer.bare_loop",
            str(run_dir),
            "--steps",
            str(min(12, config.trainer.max_steps)),
        ]
        took = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        step = took["learn"] + took["publish"]
        seconds = " | ".join(f"{took[name]:.3f}" for name in ("learn", "publish", "bare"))
        print(f"| {profile} | {seconds} | {1 - took['bare'] / step:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the demo's warm start")
    parser.add_argument("--config", type=Path, default=CONFIG, help="of both sides; default: the demo of digits")
    parser.add_argument("--data", type=Path, required=True, help="the demo's training rows")
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment with asyncrl[trl]")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "against-trl", help="keeps models and rounds")
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=PROFILES)
    parser.add_argument("--rounds", type=int, default=3, help="rounds to add; 0 prints what is there")
    parser.add_argument("--steps", type=int, default=15, help=f"of each run, {WARM_UP} of them not timed")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rows-at-once", type=int, default=0, help=f"of TRL; default: {ROWS_AT_ONCE}")
    parser.add_argument("--no-bare-loop", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of our configuration")
    arguments = parser.parse_intermixed_args()
    if arguments.trl_python == sys.executable and importlib.util.find_spec("trl") is None:
        parser.error(
            "TRL is not installed here: pip install 'asyncrl[trl]', or name the Python of an environment that has "
            "both: --trl-python PATH"
        )
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    configs = {profile: prepare(profile, arguments) for profile in arguments.profiles}
    record: Path = arguments.folder / "rounds.jsonl"
    earlier = read(record)
    for more in range(arguments.rounds):
        for profile, config in configs.items():
            number = 1 + more + max((one["round"] for one in earlier if one["profile"] == profile), default=0)
            one_round(profile, number, config, arguments)
    report(read(record), configs)
    if not arguments.no_bare_loop:
        bare_loops(configs, read(record))


def read(record: Path) -> list[dict[str, Any]]:
    return read_lines(record) if record.is_file() else []


if __name__ == "__main__":
    main()
