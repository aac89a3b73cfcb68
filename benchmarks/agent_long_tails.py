"""Tools with long tails: what lock-step turns cost, on 1 to 16 environment workers.

    python benchmarks/agent_long_tails.py [--workers 1 2 4 8 16] [--steps 14] [--sigma 1.5]

Two real processes. Conversations of three turns whose tool sleeps for a log-normal time (median 20 ms, by the
trajectory's seed, so equal in all runs): a blocking tool, of which a worker runs one at a time. The engine is the
scripted one, which takes 10 ms for a token and no processor; the learner trains a tiny model. Both settings may be one
version off policy: `lock-step` makes all trajectories that are sampled together take each turn together, as a
synchronous rollout loop does, `at once` is the rollout server as it is. Prints a Markdown table of means over time.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asyncrl.environments.interface import Action, Start
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.lamp import Lamp

HERE = Path(__file__).resolve()
WARM_UP_STEPS = 4
"""Left out: the pipeline fills."""
MEDIAN_S = 0.02
PLACES = 32
"""Environments at a time, whatever the number of processes: two steps' trajectories."""


class LongTail(Lamp):
    class Config(BaseModel):
        sigma: float = 1.5
        """Sigma of the log-normal; 0 for tools that are equally fast."""

    def reset(self, start: Start) -> Observation:
        self._rng, self._sigma = random.Random(f"{start.seed} {start.index}"), start.config.sigma
        return super().reset(start)

    def step(self, action: Action) -> StepResult:
        time.sleep(MEDIAN_S * self._rng.lognormvariate(0.0, self._sigma))
        return super().step(action)


def config_of(folder: Path, model: Path, data: Path, arguments: argparse.Namespace, workers: int) -> Any:
    from asyncrl.config.schema import RunConfig
    from tests.rigs.tiny import ROOT

    return RunConfig.model_validate(
        {
            "run_dir": str(folder),
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train_files": [str(data / "rl.parquet")], "max_prompt_length": 390, "max_response_length": 120},
            "batch": {"prompts_per_step": 4, "group_size": 4, "tokens_per_microbatch": 2048},
            "environment": {
                "name": f"{HERE}:LongTail",
                "config": {"sigma": arguments.sigma},
                "limits": {"turns": 4, "tokens_per_turn": 16, "images": 4},
                "workers": workers,
                "instances_per_worker": PLACES // workers,
            },
            "learner": {"max_staleness": 1, "cpu_threads": 1},
            "rollout": {
                "engine": "scripted",
                "cpu_threads": 1,
                "engine_args": {"text": "answer 1", "seconds_per_token": 0.01},
            },
            "reward": {"functions": [{"function": f"{ROOT}/tests/rigs/short_reward.py:short"}], "workers": 1},
            "evaluation": {"before_training": False},
            "alignment": {"rows": 0},
            "trainer": {"max_steps": arguments.steps},
            "network": {"control_port": 0, "weights_port": 0, "heartbeat_s": 0.2},
            "telemetry": {"learner_port": 0, "rollout_port": 0},
        }
    )


def run(config: Any, lock_step: bool) -> list[dict[str, float]]:
    """The records of the steps that count."""
    from tests.rigs.two_processes import with_ports, write_config

    folder = Path(config.run_dir)
    file = write_config(with_ports(config), folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    server = [str(HERE), "serve", "lock-step"] if lock_step else ["-m", "rollout_server"]
    with (folder / "log").open("w") as log:
        start = partial(subprocess.Popen, env=environment, stdout=log, stderr=log)
        services = [start([sys.executable, *each, "--config", str(file)]) for each in (["-m", "learner"], server)]
        try:
            codes = [service.wait(600) for service in services]
        finally:
            for service in services:
                service.kill()
    if codes != [0, 0]:
        raise SystemExit(f"the run failed: {(folder / 'log').read_text()[-3000:]}")
    return read_lines(folder / "metrics.jsonl")[WARM_UP_STEPS:]


def serve_in_lock_step() -> None:
    """The rollout server, whose turns go in rounds as those of an `hf` engine on policy do."""
    from rollout_server.production import environments

    environments.Environments = partial(_in_rounds, environments.Environments)  # type: ignore[misc]
    del sys.argv[1:3]
    runpy.run_module("rollout_server", run_name="__main__", alter_sys=True)


def _in_rounds(kind: Any, **values: Any) -> Any:
    return kind(**{**values, "in_rounds": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--sigma", type=float, default=1.5)
    arguments = parser.parse_args()
    from tests.rigs.tiny import make_digits, make_tiny_model

    print("| workers | turns | s per step | rollout busy | learner idle |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model, data = make_tiny_model(place / "model"), make_digits(place / "data")
        for workers in arguments.workers:
            for name in ("lock-step", "at once"):
                config = config_of(place / f"{workers} {name}", model, data, arguments, workers)
                records = run(config, name == "lock-step")
                seconds = sum(record["step_s"] for record in records)
                idle, unused = (
                    sum((record.get(key) or 0.0) * record["step_s"] for record in records) / seconds
                    for key in ("idle/learner", "idle/rollout")
                )
                print(
                    f"| {workers} | {name} | {seconds / len(records):.2f} | {1 - unused:.2f} | {idle:.2f} |", flush=True
                )


if __name__ == "__main__":
    serve_in_lock_step() if sys.argv[1:2] == ["serve"] else main()
