"""Dynamic sampling on the demo's data, of which a quarter is impossible and a quarter trivial: is it worth its price?

python benchmarks/dynamic_sampling.py [--seed 1] [--steps 150] [--each key=value ...] [--folder KEPT] [key=value ...]

Impossible rows have a wrong answer key, trivial ones are always right. One run without a filter, then one for each
setting in `--each` (by default the filter, and the filter with GRESO), from the demo's warm start; then one epoch of a
few rows with the filter, which ends with its data. Checked, else the exit code is 1: every group that a step of a
filtered run takes has spread, the ledger's residual is 0 in every line, and positions of the epoch are trained,
filtered or passed over. The table has the wall-clock time to the accuracy that the run without a filter ends with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from asyncrl.demo import reward as demo
from asyncrl.rewards.sample import RewardSample
from asyncrl.telemetry.jsonl import read_lines

FILTER = "algorithm.filters=[zero_variance]"
EACH = (FILTER, f"{FILTER} algorithm.greso={{}}")
IMPOSSIBLE, TRIVIAL = "impossible", "trivial"
EPOCH_ROWS = 200


def answer(sample: RewardSample) -> float:
    """The demo's; 1 for trivial rows. Held-out rows are as they were."""
    return 1.0 if sample.columns.get("teaches") == TRIVIAL else demo.answer(sample)


def reading(sample: RewardSample) -> float:
    return 1.0 if sample.columns.get("teaches") == TRIVIAL else demo.reading(sample)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--each", nargs="+", default=list(EACH), metavar="key=value", help="settings, one run for each")
    parser.add_argument("--folder", type=Path, default=None, help="keep data and runs here")
    parser.add_argument("--quick", action="store_true", help="the demo's small task, which learns little")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all runs")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="asyncrl-dynamic-"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not (folder / "config.yaml").exists():
        quick = ["--quick"] * arguments.quick
        call("-m", "asyncrl.demo.prepare", "--folder", str(folder), "--seed", str(arguments.seed), *quick)
    spoil(folder / "data" / "rl.parquet", folder / "data" / "half.parquet")
    common = [
        f"data.train_files=[{folder}/data/half.parquet]",
        f"reward.functions.0.function={Path(__file__).absolute()}:answer",
        f"reward.functions.1.function={Path(__file__).absolute()}:reading",
        f"evaluation.every_steps={max(arguments.steps // 10, 1)}",
        *arguments.overrides,
    ]
    runs: dict[str, Path] = {}
    for number, each in enumerate(["", *arguments.each]):
        runs[each] = train(folder, f"run-{number}", [*common, f"trainer.max_steps={arguments.steps}", *each.split()])
    epoch = [f"data.max_train_rows={EPOCH_ROWS}", "trainer.max_steps=0", "trainer.total_epochs=1", FILTER]
    runs["one epoch"] = train(folder, "epoch", [*common, *epoch])
    problems = [problem for each, run in runs.items() if each for problem in check(run)]
    show(runs)
    print("\n".join(problems) or "checked: spread in every trained group, residual 0, the epoch ends")
    return 1 if problems else 0


def call(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True)


def train(folder: Path, name: str, settings: list[str]) -> Path:
    call("-m", "asyncrl", "train", str(folder / "config.yaml"), f"run_dir={folder / name}", *settings)
    return folder / name


def spoil(source: Path, target: Path) -> None:
    """Write the rows with a column `teaches`: every fourth is impossible, every fourth trivial."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(source)
    teaches = [(IMPOSSIBLE, "", TRIVIAL, "")[row % 4] for row in range(len(table))]
    for column, wrong in (("answer", "1000"), ("digits", "0 1 2 3 4 5 6 7 8 9")):
        values = table.column(column).to_pylist()
        spoilt = [wrong if kind == IMPOSSIBLE else value for kind, value in zip(teaches, values, strict=True)]
        table = table.set_column(table.column_names.index(column), column, [spoilt])
    pyarrow.parquet.write_table(table.append_column("teaches", [teaches]), target)


def check(run: Path) -> list[str]:
    """Name what is not as it must be."""
    from asyncrl.journal import JOURNAL_FILE
    from asyncrl.journal.database import JournalReader

    problems: list[str] = []
    steps, status = read_lines(run / "metrics.jsonl"), json.loads((run / "status.json").read_text())
    flat = sum(step["zero_variance_groups"] for step in steps)
    if flat:
        problems.append(f"{run}: {flat:g} groups without spread reached the optimiser")
    if any(step["ledger_residual"] for step in steps):
        problems.append(f"{run}: the ledger's residual was not 0")
    if status["phase"] != "finished" or status["step"] != status["total_steps"]:
        problems.append(f"{run}: {status['phase']} at step {status['step']} of {status['total_steps']}")
    with closing(JournalReader(run / JOURNAL_FILE)) as journal:
        trained, filtered = sum(journal.consumed_by_step().values()), len(journal.filtered())
    groups = status["groups"]
    if groups["issued"] != trained + filtered:
        problems.append(f"{run}: {groups['issued']} issued, {trained} trained, {filtered} filtered")
    return problems


def show(runs: dict[str, Path]) -> None:
    """Print a line for each run; times are of the learner's process, evaluations included."""
    reference = next(iter(runs.values()))
    wanted = read_lines(reference / "evaluations.jsonl")[-1]["accuracy"]
    print(f"\ntime to a held-out accuracy of {wanted:.3f}\n")
    print("| setting | steps | groups sampled | filtered | held-out before | after | best | s to that accuracy | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each, run in runs.items():
        steps, evaluations = read_lines(run / "metrics.jsonl"), read_lines(run / "evaluations.jsonl")
        at = {step["step"]: step["uptime_s"] for step in steps}
        reached = [at.get(one["step"], 0.0) for one in evaluations if one["accuracy"] >= wanted]
        groups = json.loads((run / "status.json").read_text())["groups"]
        accuracy = [one["accuracy"] for one in evaluations]
        print(
            f"| {each or 'no filter'} | {steps[-1]['step']} | {groups['issued']} | "
            f"{groups['dropped'] / groups['issued']:.0%} | {accuracy[0]:.3f} | {accuracy[-1]:.3f} | "
            f"{max(accuracy):.3f} | {f'{reached[0]:.0f}' if reached else 'not reached'} | {steps[-1]['uptime_s']:.0f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
