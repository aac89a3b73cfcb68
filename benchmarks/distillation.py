"""Steps of on-policy distillation beside GRPO's, to the same held-out accuracy: SmolLM2 under adapters.

    python -m benchmarks.distillation FOLDER [--seeds 1 2 3] [--steps 20] [--student-steps 7] [key=value ...]

GRPO runs are those of `asyncrl demo llm lora`, scored every second step. The teacher is what the first seed's GRPO has
made of the model, merged. Students begin where GRPO began, and get no reward (`asyncrl train CONFIG opd`, `gkd`).
Prints a table, and one line for each run to FOLDER/records.jsonl; a run that is there is not made again. CPU seconds
are those of all processes of a run, the teacher's passes and the scores of held-out rows included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.demos.llm import ADAPTERS
from benchmarks.against_trl import ROOT, UNATTENDED
from benchmarks.easy_vqa import read_records

EVERY = 2
"""Steps between two scores of the held-out rows."""
STUDENTS = ("opd", "gkd")


def call(*words: str) -> float:
    """Run a command to its end; returns the CPU seconds of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(folder: Path, arm: str, seed: int, words: list[str]) -> dict[str, Any]:
    """The run of an arm and seed, or its record."""
    file = folder / "records.jsonl"
    for record in read_records(file):
        if (record["arm"], record["seed"], record["words"]) == (arm, seed, words):
            return record
    made, run = folder / f"demo-{seed}", folder / f"{arm}-{seed}"
    if not (made / "config.yaml").is_file():
        call("-m", "asyncrl_plugins.demos.llm", str(made), "--seed", str(seed))
    command = ("-m", "asyncrl", "train", str(made / "config.yaml"), str(ADAPTERS))
    scored = {"evaluation.every_steps": EVERY, "evaluation.before_training": "true", "trainer.save_freq": 0}
    settings = UNATTENDED | scored | {"run_dir": run, "trainer.seed": seed}
    cpu_s = call(*command, *words, "--unattended", *(f"{key}={value}" for key, value in settings.items()))
    scores = {line["step"]: line["accuracy"] for line in read_lines(run / "evaluations.jsonl")}
    record = {"arm": arm, "seed": seed, "cpu_s": round(cpu_s), "accuracy": scores, "words": words}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{json.dumps(record)}\n")
    return json.loads(json.dumps(record))


def table(records: list[dict[str, Any]]) -> None:
    """Accuracy by step, mean and spread over seeds, and CPU seconds."""
    for arm in dict.fromkeys(record["arm"] for record in records):
        mine = [record for record in records if record["arm"] == arm]
        steps = list(mine[0]["accuracy"])
        print(f"\n| {arm}, {len(mine)} seeds | {' | '.join(steps)} | CPU s |\n|{'---|' * (len(steps) + 2)}")
        columns = [[record["accuracy"][step] for record in mine] for step in steps]
        spread = [f"{mean(column):.3f}" + (f" ± {stdev(column):.3f}" if len(column) > 1 else "") for column in columns]
        print(f"| held-out, greedy | {' | '.join(spread)} | {mean(record['cpu_s'] for record in mine):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--student-steps", type=int, default=7)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="of every run")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    records, teacher = [], folder / "teacher"
    for seed in arguments.seeds:
        records.append(train(folder, "grpo", seed, [*arguments.changes, f"trainer.max_steps={arguments.steps}"]))
        if not teacher.is_dir():
            call("-m", "asyncrl", "export", str(folder / f"grpo-{seed}"), str(teacher), "--merged")
    for method in STUDENTS:
        words = [method, f"reference.path={teacher}", f"trainer.max_steps={arguments.student_steps}"]
        records += [train(folder, method, seed, [*words, *arguments.changes]) for seed in arguments.seeds]
    table(records)


if __name__ == "__main__":
    main()
