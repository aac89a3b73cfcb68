"""The digits task with a real engine, by the command that a user types: two services, live updates, images."""

from __future__ import annotations

import sqlite3
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.launch.ports import free_port
from asyncrl.plugins import installed_exporter
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start_command, with_ports, write_config
from tests.system.test_end_to_end import lines

STEPS = 24


def check_digits_run(
    make_config: Callable[..., RunConfig], folder: Path, engine: str, *, processes: int, timeout_s: float
) -> None:
    """The reward rises, every group is consumed, the engine's metrics are served where an exporter is installed, and at
    the end none of the run's processes is left; while it runs there are at least `processes`."""
    run = folder / "run"
    config = with_ports(
        make_config(
            learner={"max_staleness": 2, "optim": {"lr": 3e-3, "weight_decay": 0.0}},
            batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
            data={"max_response_length": 16},
            rollout={"engine": engine, "weights_channel": "zmq", "weight_update": "recompute"},
            trainer={"max_steps": STEPS, "samples_per_step": 1},
        ),
        free_port,
    )
    file = write_config(config, folder / "config")
    train = start_command("train", str(file), log=folder / "out")
    scraped, started, has_exporter = "", list[psutil.Process](), installed_exporter() is not None
    try:
        deadline = time.monotonic() + timeout_s
        while train.poll() is None and time.monotonic() < deadline:
            if len(lines(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []) > 3 and not started:
                if has_exporter:
                    address = f"http://127.0.0.1:{config.telemetry.rollout_port}/metrics"
                    with urllib.request.urlopen(address, timeout=5) as answer:
                        scraped = answer.read().decode()
                started = psutil.Process(train.pid).children(recursive=True)
            time.sleep(0.1)
        said = (folder / "out").read_text()[-3000:] + (logs(run / "logs") if (run / "logs").exists() else "")
        assert train.poll() == 0, said
    finally:
        if train.poll() is None:
            train.terminate()
            train.wait(timeout=30)
    assert len(started) >= processes
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert (f"{engine}:generation_tokens_total" in scraped) == has_exporter
    assert ("asyncrl_rollout_groups_total" in scraped) == has_exporter

    steps = lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == STEPS
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5]), rewards
    assert all(step["ledger_residual"] == 0 for step in steps)
    assert all(step["rows/error"] == step["rows/timed_out"] == 0 for step in steps)
    assert any((run / "images").iterdir())
    with closing(sqlite3.connect(run / JOURNAL_FILE)) as db:
        assert db.execute("SELECT count(*) FROM consumption").fetchone() == (8 * STEPS,)
