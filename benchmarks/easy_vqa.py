"""The demo of pictures beside its baselines: arms by seeds, scored on the whole official test split of easy-VQA.

    python -m benchmarks.easy_vqa RUNS [--seeds 1 2 3] [--arms grpo sft ...] [key=value ...]

Takes hours on two cores. A piece (a run, or scores of its policy) that is done stands in RUNS/records.jsonl and is not
made again; a run that Ctrl-C or SIGTERM has cut off goes on from its newest checkpoint. To continue a published table
copy benchmarks/measured/easy_vqa.jsonl to RUNS/records.jsonl. `benchmarks/easy_vqa_report.py` writes the page of it.

- start: the demo's, no run
- grpo: the demo's run, with LoRA, 60 steps of 16 prompts and 4 completions
- sft: supervised training on right completions of the same questions, for as many CPU seconds as that seed's grpo
- blind: grpo of rows without their pictures
- digits: settings of `asyncrl demo digits`: all weights, 32 prompts and 8 completions, for as many completions as grpo

CPU seconds are those of all processes of a run: other work beside it changes its seconds, and these little. A run
that goes on has loaded once more, which counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO as DIGITS
from asyncrl.run_folder.contents import checkpoint_folders
from asyncrl.telemetry.host_versions import describe_environment
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.demos.easy_vqa import kind_of, questions

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "asyncrl_plugins" / "demos"
ARMS = ("start", "grpo", "sft", "blind", "digits")
DIGITS_STEPS = 15
"""Steps of 32 x 8 completions, as many as 60 of 16 x 4."""
SFT_STEPS = (2, 12)
"""Two short runs tell what a step of supervised training costs."""
SETS = {"balanced": "eval", "test": "test_all"}
"""Files of rows by what is scored on them."""
RECORDS = "records.jsonl"


class Study:
    """Pieces in a folder, made one after the other."""

    def __init__(self, folder: Path, changes: Sequence[str]):
        """`changes`: `key=value` of every training run."""
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        self.folder, self._changes = folder.resolve(), changes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / RECORDS
        self.records = read_records(self._file)

    def train(self, arm: str, seed: int) -> None:
        """The run of a cell, unless it is there, and its scores on the demo's held-out rows."""
        name, run = self._cell(arm, seed)
        self._prepare(seed)
        if arm != "start" and not self._has(name, "train"):
            settings, steps = self._settings(arm, seed)
            self._train(arm, name, seed, steps, settings)
        if arm == "grpo":
            self._score(arm, seed, "halfway", "balanced", run / "checkpoints" / "step-000030" / "adapter")
        self.score(arm, seed, "balanced")

    def majority(self) -> None:
        """Scores of the most frequent answer to a question's text, without a policy."""
        self._prepare(1)
        data = self.folder / "data-1"
        known = {"test": questions("train"), "balanced": _asked(data / "rl.parquet")}
        for rows, file in SETS.items():
            if self._has("majority", rows):
                continue
            answers: dict[str, Counter[str]] = defaultdict(Counter)
            for text, answer, *_ in known[rows]:
                answers[text.lower()][answer] += 1
            scored = [
                {
                    "kind": kind_of(text.lower()),
                    "right": answer == answers[text.lower()].most_common(1)[0][0],
                    "seen": None,
                }
                for text, answer in _asked(data / f"{file}.parquet")
            ]
            self._keep_scores(scored, cell="majority", piece=rows, arm="majority", seed=0, cpu_s=0.0)

    def score(self, arm: str, seed: int, rows: str) -> None:
        """Scores of a cell's policy on `balanced` or `test`."""
        _, run = self._cell(arm, seed)
        self._score(arm, seed, rows, rows, run / ("warm_start" if arm == "start" else "export"))

    def _cell(self, arm: str, seed: int) -> tuple[str, Path]:
        """Name and folder. The start is one for all seeds."""
        name = arm if arm == "start" else f"{arm}-{seed}"
        return name, self.folder / name

    def _prepare(self, seed: int) -> None:
        start, data = self.folder / "start", self.folder / f"data-{seed}"
        if not (start / "config.yaml").is_file():
            shutil.rmtree(start, ignore_errors=True)
            self._call("prepare", "-m", "asyncrl_plugins.demos.vqa", str(start))
        if not (data / "test_all_blind.parquet").is_file():
            self._call("prepare", "-m", "asyncrl_plugins.demos.easy_vqa", str(data), "--seed", str(seed))
            for name in ("rl", "eval", "test_all"):
                _without_pictures(data / f"{name}.parquet", data / f"{name}_blind.parquet")

    def _settings(self, arm: str, seed: int) -> tuple[list[str], int]:
        """Words of a run's command, and its number of steps."""
        data = self.folder / f"data-{seed}"
        rows = data / f"rl{'_blind' if arm == 'blind' else ''}.parquet"
        words = [
            f"model.path={self.folder}/start/warm_start",
            f"data.train_files=[{rows}]",
            f"data.val_files=[{data}/eval.parquet]",
            f"trainer.seed={seed}",
        ]
        if arm == "sft":
            cost, begun = self._supervised_cost(words, seed)
            steps = max(1, round((self._record(f"grpo-{seed}", "train")["cpu_s"] - begun) / cost))
            return [str(DEMO / "vqa_sft.yaml"), *words, f"sft.steps={steps}"], steps
        words += ["evaluation.every_steps=0", "evaluation.before_training=false"]
        words += [f"{port}=0" for port in ("network.control_port", "network.weights_port")]
        words += [f"{port}=0" for port in ("telemetry.learner_port", "telemetry.rollout_port")]
        if arm != "digits":
            return [str(DEMO / "vqa.yaml"), *words], load_config(DEMO / "vqa.yaml").trainer.max_steps
        rewards = "[{function: asyncrl_plugins.demos.reward:right}]"
        words += ["data.max_response_length=14", f"reward.functions={rewards}", f"trainer.max_steps={DIGITS_STEPS}"]
        return [str(DIGITS), *words], DIGITS_STEPS

    def _supervised_cost(self, words: Sequence[str], seed: int) -> tuple[float, float]:
        """CPU seconds of a step, and of what is done once."""
        for steps in SFT_STEPS:
            name = f"sft-of-{steps}"
            if not self._has(name, "train"):
                (self.folder / f"{name}.cpu").unlink(missing_ok=True)  # one that goes on would count its loading twice
                self._train("sft", name, seed, steps, [str(DEMO / "vqa_sft.yaml"), *words, f"sft.steps={steps}"])
                shutil.rmtree(self.folder / name)
        few, many = (self._record(f"sft-of-{steps}", "train")["cpu_s"] for steps in SFT_STEPS)
        cost = (many - few) / (SFT_STEPS[1] - SFT_STEPS[0])
        return cost, few - SFT_STEPS[0] * cost

    def _train(self, arm: str, name: str, seed: int, steps: int, settings: Sequence[str]) -> None:
        run, spent = self.folder / name, self.folder / f"{name}.cpu"
        goes_on = spent.is_file() and bool(checkpoint_folders(run))  # both are there where a signal has stopped it
        before = float(spent.read_text()) if goes_on else 0.0
        if not goes_on:
            shutil.rmtree(run, ignore_errors=True)
        spent.unlink(missing_ok=True)  # an attempt that is killed loses its count, and the run is made again
        train = ["sft", *["--resume"] * goes_on] if arm == "sft" else ["train", "--unattended"]
        began, cpu = time.monotonic(), _children()
        try:
            self._call(name, "-m", "asyncrl", *train, *settings, f"run_dir={run}", *self._changes)
        finally:
            spent.write_text(str(before + _children() - cpu))
        lines = read_records(run / "metrics.jsonl")
        rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
        self._keep(
            cell=name,
            piece="train",
            arm=arm,
            seed=seed,
            steps=steps,
            cpu_s=round(before + _children() - cpu, 1),
            wall_s=round(time.monotonic() - began, 1),
            reward=[
                round(sum(part) / len(part), 3) for at in range(0, len(rewards), 10) if (part := rewards[at:][:10])
            ],
        )

    def _score(self, arm: str, seed: int, piece: str, rows: str, model: Path) -> None:
        name, _ = self._cell(arm, seed)
        if self._has(name, piece):
            return
        config = self.folder / "start" / "config.yaml"
        file = self.folder / f"data-{seed}" / f"{SETS[rows]}{'_blind' if arm == 'blind' else ''}.parquet"
        out, cpu = self.folder / f"{name}-{piece}.jsonl", _children()
        score = ("--model", str(model), "--rows", str(file), "--out", str(out))
        self._call(f"{name}-{piece}", "-m", "benchmarks.easy_vqa_scores", str(config), *score)
        scored = read_records(out)
        more = {"wrote": scored[:12]} if piece == "balanced" else {}
        self._keep_scores(scored, cell=name, piece=piece, arm=arm, seed=seed, cpu_s=round(_children() - cpu, 1), **more)

    def _keep_scores(self, scored: Sequence[dict[str, Any]], **record: Any) -> None:
        by_kind: dict[str, list[bool]] = defaultdict(list)
        for each in scored:
            by_kind[each["kind"]].append(each["right"])
        read = [each["seen"] for each in scored if each["seen"] is not None]
        self._keep(
            **record,
            rows=len(scored),
            accuracy=_share([each["right"] for each in scored]),
            seen=_share(read) if read else None,
            by_kind={kind: [len(values), _share(values)] for kind, values in sorted(by_kind.items())},
        )

    def _record(self, cell: str, piece: str) -> dict[str, Any]:
        return next(each for each in self.records if (each["cell"], each["piece"]) == (cell, piece))

    def _has(self, cell: str, piece: str) -> bool:
        return any((each["cell"], each["piece"]) == (cell, piece) for each in self.records)

    def _keep(self, **record: Any) -> None:
        host = describe_environment()
        record |= {"date": date.today().isoformat(), **{name: host[name] for name in ("cpu", "cores", "python")}}
        record |= {name: host["packages"][name] for name in ("torch", "transformers")}
        self.records.append(record)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record)}\n")
        shown = f"{record['accuracy']:.4f}" if "accuracy" in record else f"{record['steps']} steps"
        print(f"{record['cell']} {record['piece']}: {shown}, {record['cpu_s']:.0f} CPU s", flush=True)

    def _call(self, name: str, *words: str) -> None:
        """Run a command to its end, also where this process is asked to stop: runs write a checkpoint then."""
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait()
            except BaseException:
                process.send_signal(signal.SIGINT)
                process.wait()
                raise
        if code:
            sys.exit(f"{name} ended with {code}: see {self.folder / name}.log")


def read_records(file: Path) -> list[dict[str, Any]]:
    """Values of JSON lines; none without the file."""
    return read_lines(file) if file.is_file() else []


def _children() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _share(values: Sequence[bool]) -> float:
    return round(sum(values) / len(values), 5)


def _asked(rows: Path) -> list[tuple[str, str]]:
    """Texts and answers."""
    table = pq.read_table(rows, columns=["prompt", "answer"]).to_pylist()
    return [(row["prompt"].replace("<image>", ""), row["answer"]) for row in table]


def _without_pictures(rows: Path, target: Path) -> None:
    table = pq.read_table(rows)
    texts = [text.replace("<image>", "") for text in table["prompt"].to_pylist()]
    bare = table.drop_columns(["images", "prompt"])
    pq.write_table(bare.append_column("prompt", [texts]), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="records, runs, and a log of each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="of every training run")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    study = Study(arguments.runs, arguments.changes)
    for seed in arguments.seeds:
        for arm in arguments.arms:
            study.train(arm, seed)
        study.majority()
        for arm in arguments.arms:
            study.score(arm, seed, "test")


if __name__ == "__main__":
    main()
