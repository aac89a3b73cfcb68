"""How long a checkpoint keeps the learner from training, on a CPU.

    python -m benchmarks.checkpoint_blocking [--model FOLDER ...] [--ranks 1] [--zero-stage 3] [--dtype bfloat16]
        [--repeats 5]

Each model (without --model: the demo's of 1.8 M parameters and a random one of 100 M) is trained on made-up tokens, in
fp32 if not said otherwise; several ranks are FSDP2's, or DeepSpeed's of that stage. A checkpoint is written while
training waits (`trainer.save_async=false`), and beside the steps that follow. Prints a Markdown table of medians:
seconds blocked and until the checkpoint is complete, seconds of a step without and beside a write, and the memory that
rank 0 and the others have of their own (RssAnon, MiB): before a checkpoint, at most meanwhile, and what loading the
model and making its optimiser adds at most.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
COLUMNS = (
    "blocked s",
    "complete after s",
    "step s",
    "step s beside a write",
    "MiB before",
    "MiB at most",
    "MiB to load",
    "other ranks before",
    "other ranks at most",
    "other ranks to load",
)
TOKENS = 64


def make_models(folder: Path) -> list[Path]:
    for name, module, words in (
        ("digits", "asyncrl.demo.model", ()),
        ("100m", "benchmarks.random_models", ("--size", "100m")),
    ):
        command = [sys.executable, "-m", module, "--out", str(folder / name), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    return [folder / "digits", folder / "100m"]


def measure(model: Path, words: argparse.Namespace, *, beside: bool) -> dict[str, float]:
    """Measure in fresh processes, one for each rank."""
    ranks = words.ranks
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.checkpoint_blocking", "--measure", "--model", str(model)]
    command += ["--repeats", str(words.repeats), "--ranks", str(ranks), "--dtype", words.dtype]
    command += ["--zero-stage", str(words.zero_stage), *(["--beside"] if beside else [])]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    shared |= {"HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes)
    return json.loads(printed[0].splitlines()[-1])


def rank_side(words: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from asyncrl.config.schema import RunConfig
    from asyncrl.devices.device import free_caches
    from asyncrl.processing.encoded_prompt import EncodedPrompt
    from asyncrl.processing.processor import PromptProcessor
    from asyncrl.run_folder.contents import MODEL_FOLDER
    from learner.loop.checkpoint import (
        BackgroundWrite,
        LearnerState,
        Snapshot,
        make_building_folder,
        save_checkpoint,
    )
    from learner.ranks.group import Ranks
    from learner.training.engine import TorchEngine
    from learner.training.packing import PackedTrajectory, TrainGroup

    torch.set_num_threads(1)
    model, ranks, beside = words.model[0], words.ranks, words.beside
    learner: dict[str, Any] = {"device": "cpu"}
    if words.zero_stage:
        learner |= {"engine": "deepspeed", "deepspeed": {"zero_stage": words.zero_stage}, "num_processes": ranks}
    elif ranks > 1:
        learner |= {"engine": "fsdp2", "num_processes": ranks}
    rank = int(os.environ["RANK"])
    if "engine" in learner:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=os.environ.get("ASYNCRL_BENCHMARK_DISK")) as own:
        run = [own]
        if ranks > 1:
            dist.broadcast_object_list(run)
        run_path = Path(run[0])
        config = RunConfig.model_validate(
            {
                "run_dir": run[0],
                "model": {"path": str(model), "dtype": words.dtype, "freeze_vision_tower": False},
                "data": {"train_files": ["none.jsonl"]},
                "learner": learner,
                "reward": {"functions": [{"function": "exact_match"}]},
            }
        )
        engine = TorchEngine(config.model_settings, config.learner.optim, 1000, Ranks(rank, ranks, rank))
        without = own_memory()
        with most_memory() as loading:
            engine.prepare()
        processor = PromptProcessor(config.model).processor
        ids = np.random.default_rng(0).integers(5, 200, TOKENS)
        completion = PackedTrajectory(row=0, token_ids=ids, is_trained=np.ones(len(ids), bool))
        group = TrainGroup(EncodedPrompt.of_text(ids), (completion,))

        def step() -> float:
            began = time.monotonic()
            engine.backward(engine.forward(engine.pack([group])).logprobs.sum())
            engine.optimizer_step()
            return time.monotonic() - began

        def write(number: int) -> BackgroundWrite:
            building = [make_building_folder(run_path, number) if rank == 0 else Path()]
            if ranks > 1:
                dist.broadcast_object_list(building)
            state = LearnerState(step=number, version=number, architecture="", run_id="")
            files = engine.model_files(processor, copies=beside), {"": engine.files(copies=beside)}
            snapshot = Snapshot(state, torch.get_rng_state(), MODEL_FOLDER, *files)
            if rank == 0:
                return BackgroundWrite(lambda: save_checkpoint(run_path, building[0], snapshot, 2))
            return BackgroundWrite(lambda: snapshot.write_files(building[0]))

        rows: list[dict[str, float]] = []
        step()
        for number in range(1, words.repeats + 1):
            alone = median(step() for _ in range(3))
            free_caches(torch.device("cpu"))  # what the C library keeps for reuse
            before = own_memory()
            with most_memory() as most:
                began = time.monotonic()
                writing = write(number)
                if not beside:
                    writing.wait(600)
                blocked, steps = time.monotonic() - began, []
                if beside:
                    steps = [step() for _ in range(3)]  # as many on each rank
                    writing.wait(600)
                complete = time.monotonic() - began
            mine = [(before, most[0], loading[0] - without)] * ranks
            if ranks > 1:
                dist.all_gather_object(mine, mine[0])
            others = [max(values) for values in zip(*mine[1:], strict=True)] or [nan, nan, nan]
            values = (blocked, complete, alone, median(steps) if steps else nan, *mine[0], *others)
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        if ranks > 1:
            dist.barrier()
    return {column: median(row[column] for row in rows) for column in COLUMNS}


def own_memory() -> float:
    """MiB that only this process has, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextmanager
def most_memory() -> Iterator[list[float]]:
    """The largest `own_memory` inside."""
    most, over = [own_memory()], threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            most[0] = max(most[0], own_memory())

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield most
    finally:
        over.set()
        watching.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=0, help="0: FSDP2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    words: Any = parser.parse_args()
    if words.measure:
        print(json.dumps(rank_side(words)))
        return
    with tempfile.TemporaryDirectory() as made:
        models = words.model or make_models(Path(made))
        print(f"| model | ranks | training | {' | '.join(COLUMNS)} |")
        print("|---|---|---|" + "---|" * len(COLUMNS), flush=True)
        for model in models:
            for beside in (False, True):
                found = measure(model, words, beside=beside)
                cells = [f"{found[column]:.3g}" for column in COLUMNS[:4]]
                cells += [f"{found[column]:.0f}" for column in COLUMNS[4:]]
                print(f"| {model.name} | {words.ranks} | {'goes on' if beside else 'waits'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
