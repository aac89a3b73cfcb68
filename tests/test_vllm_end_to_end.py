"""The digits task with the real vLLM, by the command that a user types: two processes, live weight updates, images."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from asyncrl.config.schema import RunConfig
from learner.journal import JOURNAL_FILE
from tests.small_runs import logs
from tests.test_end_to_end import lines
from tests.two_processes import with_ports, write_config
from tests.vllm_rig import MISSING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="vLLM is not installed: WITH_VLLM=1 bash scripts/install.sh"),
]


def test_the_digits_task_trains_through_vllm_and_its_reward_rises(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = with_ports(
        make_config(
            learner={"max_staleness": 2, "optim": {"lr": 3e-3, "weight_decay": 0.0}},
            batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
            data={"max_response_length": 16},
            rollout={"engine": "vllm", "weights_channel": "zmq", "weight_update": "recompute"},
            trainer={"max_steps": 30, "samples_per_step": 1},
        )
    )
    file = write_config(config, tmp_path / "config")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-m", "asyncrl", "train", str(file)]
        train = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        scraped, processes = "", list[psutil.Process]()
        try:
            deadline = time.monotonic() + 240
            while train.poll() is None and time.monotonic() < deadline:
                if len(lines(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []) > 3 and not scraped:
                    address = f"http://127.0.0.1:{config.telemetry.rollout_port}/metrics"
                    with urllib.request.urlopen(address, timeout=5) as answer:
                        scraped = answer.read().decode()
                    processes = psutil.Process(train.pid).children(recursive=True)
                time.sleep(0.1)
            said = (tmp_path / "out").read_text()[-3000:] + (logs(run / "logs") if (run / "logs").exists() else "")
            assert train.poll() == 0, said
        finally:
            if train.poll() is None:
                train.terminate()
                train.wait(timeout=30)
    assert len(processes) >= 4  # learner, server, vLLM's core, rewards
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
    assert "vllm:generation_tokens_total" in scraped
    assert "asyncrl_rollout_groups_total" in scraped

    steps = lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == 30
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5]), rewards
    assert all(step["ledger_residual"] == 0 for step in steps)
    assert all(step["rows/error"] == step["rows/timed_out"] == 0 for step in steps)
    assert any((run / "images").iterdir())
    with closing(sqlite3.connect(run / JOURNAL_FILE)) as db:
        assert db.execute("SELECT count(*) FROM consumption").fetchone() == (240,)
