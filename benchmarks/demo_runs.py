"""Runs of the digit task from the demo's warm start, side by side and resumable: what tables of accuracy are made of.

One line per finished run is appended to FOLDER/runs.jsonl; runs that stand there are skipped. Data of a seed is made
first, or taken from the folder of `benchmarks/demo_seeds.py --folder`. benchmarks/measured/ keeps lines of tables that
take longer than a day's work: copied to FOLDER/runs.jsonl they are continued.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from asyncrl.demo.prepare import GRPO
from asyncrl.telemetry.jsonl import read_lines

ROOT = Path(__file__).parent.parent
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Run:
    """One run of a table."""

    labels: tuple[tuple[str, Any], ...]
    """Settings in the run's line, the seed excepted."""
    seed: int
    words: tuple[str, ...]
    """Overrides and overlays."""

    @property
    def name(self) -> str:
        return "-".join(str(value) for _, value in (*self.labels, ("seed", self.seed)))


class DemoRuns:
    """Runs what is missing, and keeps what was measured."""

    def __init__(self, folder: Path, warm_starts: Path | None, words: Sequence[str], most_seconds: float):
        """`words`: overrides of every run. A run that takes longer than `most_seconds` is stopped and not recorded."""
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        self.folder = folder.resolve()
        self.warm_starts = (warm_starts or folder / "warm-starts").resolve()
        self._words = words
        self._most_seconds = most_seconds
        self._lines = self.folder / "runs.jsonl"
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)

    def measured(self) -> list[dict[str, Any]]:
        return read_lines(self._lines) if self._lines.exists() else []

    def make(self, wanted: Sequence[Run], jobs: int, read: Callable[[Path], dict[str, Any]]) -> list[str]:
        """Make the runs that are not measured yet. `read`: what a run's line says of its folder.

        A run that fails does not end the others; what is wrong with each is returned, and it is tried again next time.
        """
        done = {line["name"] for line in self.measured()}
        missing = [run for run in wanted if run.name not in done]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self._prepare, sorted({run.seed for run in missing})))
            problems = pool.map(lambda run: self._try(run, read), missing)
            return [problem for problem in problems if problem]

    def _prepare(self, seed: int) -> None:
        """Data of a seed beside the demo's warm start, unless they are there."""
        folder = self.warm_starts / f"seed-{seed}"
        if not (folder / "config.yaml").is_file():
            self._call(["-m", "asyncrl.demo.prepare", "--folder", str(folder), "--seed", str(seed)], f"prepare-{seed}")

    def _try(self, run: Run, read: Callable[[Path], dict[str, Any]]) -> str:
        try:
            self._run(run, read)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{run.name} failed: {error}", flush=True)
            return f"{run.name}: {error}"
        return ""

    def _run(self, run: Run, read: Callable[[Path], dict[str, Any]]) -> None:
        start, run_dir = self.warm_starts / f"seed-{run.seed}", self.folder / run.name
        shutil.rmtree(run_dir, ignore_errors=True)  # of an attempt that was cut off
        words = [
            f"run_dir={run_dir}",
            f"model.path={start}/warm_start",
            f"data.train_files=[{start}/data/rl.parquet]",
            f"data.val_files=[{start}/data/eval.parquet]",
            f"trainer.seed={run.seed}",
            "trainer.save_freq=0",
            "trainer.samples_per_step=0",
            *("learner.cpu_threads=1", "rollout.cpu_threads=1", "reward.workers=1"),
            *(f"{port}=0" for port in ("network.control_port", "network.weights_port")),
            *(f"{port}=0" for port in ("telemetry.learner_port", "telemetry.rollout_port")),
            *run.words,
            *self._words,
        ]
        began = time.monotonic()
        self._call(["-m", "asyncrl", "train", str(GRPO), *words], run.name)
        line = {"name": run.name, **dict(run.labels), "seed": run.seed, "wall_s": time.monotonic() - began}
        line |= read(run_dir)
        with self._lock, self._lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shutil.rmtree(run_dir / "export", ignore_errors=True)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        print(f"{run.name}: accuracy {line['accuracy']:.3f}, {line['wall_s']:.0f} s", flush=True)

    def _call(self, command: list[str], name: str) -> None:
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=self._most_seconds,
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: see {log}")


def read_run(run_dir: Path, skip: int, means: Sequence[str], maxima: Sequence[str] = ()) -> dict[str, Any]:
    """Accuracy at the end, and of the steps after the first `skip` (the pipeline is full by then) means and maxima."""
    evaluation, steps = read_lines(run_dir / "evaluations.jsonl")[-1], read_lines(run_dir / "metrics.jsonl")
    full = steps[skip:] or steps
    return {
        "accuracy": evaluation["accuracy"],
        "rows": evaluation["rows"],
        "steps": len(steps),
        "reward_last_10": mean(step["reward/mean"] for step in steps[-10:]),
        "entropy_last_10": mean(step["entropy"] for step in steps[-10:] if "entropy" in step),
        "train_s": sum(step["step_s"] for step in steps),
        **{_column(key): mean(step.get(key, 0.0) for step in full) for key in means},
        **{_column(key): max(step[key] for step in steps if key in step) for key in maxima},
    }


def _column(key: str) -> str:
    return {"staleness/mean": "staleness_mean", "staleness/max": "staleness_max", "idle/learner": "learner_idle"}.get(
        key, key
    )


def table_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that all tables have; `make_table` takes its arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="results and logs")
    parser.add_argument("--warm-starts", type=Path, default=None, help="seed-N of benchmarks/demo_seeds.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--print", action="store_true", help="only print what has been measured")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    return parser


def make_table(
    arguments: argparse.Namespace,
    wanted: Sequence[Run],
    read: Callable[[Path], dict[str, Any]],
    print_table: Callable[[list[dict[str, Any]]], None],
    most_seconds: float,
) -> None:
    """Make the runs that are missing, print the table of all, and exit with what failed."""
    runs = DemoRuns(arguments.folder, arguments.warm_starts, arguments.overrides, most_seconds)
    failed = [] if arguments.print else runs.make(wanted, arguments.jobs, read)
    if runs.measured():
        print_table(runs.measured())
    if failed:
        sys.exit("\n".join(failed))
