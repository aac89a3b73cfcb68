"""Share of a learner's step that is neither the model's forward and backward pass nor the optimiser: a run on a CPU.

    python -m benchmarks.framework_share [--steps 20] [--lengths 16 64] [key=value ...]

A run of the demo's configuration with a model of random weights: the learner in this process, a rollout server in
another. Counted is the CPU time of the learner's main thread, on which the model computes, too (one thread), from the
wait for a batch until the next one: other work on the machine moves it little. Each function's time is without that of
the functions listed beside it. What other threads of the learner take (sockets, verification, journal, prompts ahead,
samples) is a row of its own: they stop no step, but want a core.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from asyncrl.config.load import dump_config, load_config
from asyncrl.demo import data as demo_data
from asyncrl.demo import model as demo_model
from asyncrl.devices.device import keep_freed_memory
from asyncrl.models import output_head
from learner import training_loop
from learner.loop import trainer
from learner.reporting.reporter import Reporter
from learner.service import Learner
from learner.tickets.ledger import TicketLedger
from learner.training import step
from learner.training.engine import TorchEngine
from tests.rigs.ports import own_port

CONFIG = Path(__file__).parent.parent / "asyncrl" / "demo" / "grpo.yaml"
WARM_UP_STEPS = 4
MODEL = ("forward", "backward", "optimiser")
PARTS: dict[str, list[tuple[Any, str]]] = {
    "forward": [(TorchEngine, "forward")],
    "backward": [(TorchEngine, "backward")],
    "optimiser": [(TorchEngine, "optimizer_step")],
    "entropies for the report": [(output_head, "entropies")],
    "prompts and completions as a batch": [(trainer, "make_batch")],
    "packing": [(TorchEngine, "pack")],
    "credit and selections": [(step.LearnerStep, "_decide")],
    "loss of a micro-batch, but for the model": [(step.Objective, "__call__")],
    "columns and metrics of the step": [(step.LearnerStep, "__call__"), (trainer, "describe_batch")],
    "publication": [(training_loop, "publish")],
    "metrics, samples and status in files": [(Reporter, "step"), (Reporter, "status")],
    "ledger": [(TicketLedger, name) for name in ("take", "advance", "counts", "length_bias")],
    "everything else": [(training_loop, "_one_step")],
}


class Meter:
    """CPU seconds of the main thread by the innermost part that is being computed, for each step."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self._spent: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = time.thread_time()
        self._others = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._count()
        self._open.append(name)
        yield
        self._count()
        self._open.pop()
        if not self._open:
            others = time.process_time() - time.thread_time()
            self._spent["(other threads)"] = others - self._others  # pyright: ignore[reportArgumentType]
            self._others = others
            self.steps.append(self._spent)
            self._spent = Counter()

    def _count(self) -> None:
        now = time.thread_time()
        if self._open:
            self._spent[self._open[-1]] += now - self._since  # pyright: ignore[reportArgumentType]
        self._since = now

    def watch(self, owner: Any, name: str, part: str) -> Callable[[], None]:
        """Measure a function. Returns what undoes it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() or not (
                self._open or part == "everything else"
            ):
                return original(*args, **kwargs)
            with self.part(part):
                return original(*args, **kwargs)

        setattr(owner, name, measured)
        return functools.partial(setattr, owner, name, original)


def run(folder: Path, length: int, steps: int, overrides: list[str]) -> Meter:
    """The meter of a run of `steps` steps."""
    config = load_config(
        CONFIG,
        [
            f"run_dir={folder / f'run-{length}'}",
            f"model.path={folder / 'model'}",
            f"data.train_files=[{folder}/data/rl.parquet]",
            f"data.val_files=[{folder}/data/eval.parquet]",
            f"data.max_response_length={length}",
            f"trainer.max_steps={steps + WARM_UP_STEPS}",
            "trainer.save_freq=0",
            "evaluation.before_training=false",
            "evaluation.every_steps=0",
            "model.dtype=float32",
            "learner.cpu_threads=1",
            "rollout.cpu_threads=1",
            *(f"{name}={own_port()}" for name in ("network.control_port", "network.weights_port")),
            "telemetry.learner_port=0",
            "telemetry.rollout_port=0",
            *overrides,
        ],
    )
    file = folder / f"config-{length}.yaml"
    file.write_text(dump_config(config))
    keep_freed_memory()  # as `python -m learner` does
    meter = Meter()
    undo = [meter.watch(owner, name, part) for part, places in PARTS.items() for owner, name in places]
    with (folder / "server.log").open("w") as log:
        command = [sys.executable, "-m", "rollout_server", "--config", str(file)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            learner = Learner(config)
            gc.freeze()  # as `python -m learner` does
            training_loop.train(learner)
        finally:
            server.terminate()
            server.wait()
            for undone in undo:
                undone()
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64], help="tokens of a completion")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    torch.set_num_threads(1)
    found: dict[int, list[Counter[str]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        demo_data.main(["--out", str(folder / "data"), "--sft-rows", "64"])
        demo_model.main(["--out", str(folder / "model")])
        for length in arguments.lengths:
            found[length] = run(folder, length, arguments.steps, arguments.overrides).steps[WARM_UP_STEPS:]
    print("\n| CPU ms of a step, medians | " + " | ".join(f"{length} tokens" for length in found) + " |")
    print("|---" * (len(found) + 1) + "|")
    for part in [*PARTS, "(other threads)"]:
        print(
            f"| {part} | "
            + " | ".join(f"{1000 * median(s[part] for s in steps):.1f}" for steps in found.values())
            + " |"
        )
    shares = [median(_share(spent) for spent in steps) for steps in found.values()]
    print("| **share that is not the model's** | " + " | ".join(f"**{100 * share:.1f} %**" for share in shares) + " |")


def _share(spent: Counter[str]) -> float:
    total = sum(seconds for part, seconds in spent.items() if part in PARTS)
    return 1 - sum(spent[part] for part in MODEL) / total


if __name__ == "__main__":
    main()
