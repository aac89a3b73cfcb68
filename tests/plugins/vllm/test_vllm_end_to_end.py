"""The digits task with the real vLLM, by the command that a user types: two processes, live weight updates, images; and
the same two taking turns on one device."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.launch.ports import free_port
from protocol.device_lock import TRACE_FILE, USERS_FILE, DeviceLease, process_birth
from tests.plugins.vllm_rig import NEEDS_VLLM, fork_cores
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start_command, with_ports, write_config
from tests.system.test_end_to_end import lines
from tests.system.test_sync import Pair

pytestmark = NEEDS_VLLM


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
            trainer={"max_steps": 22, "samples_per_step": 1},
        ),
        free_port,
    )
    file = write_config(config, tmp_path / "config")
    train = start_command("train", str(file), log=tmp_path / "out")
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
    assert len(steps) == 22
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5]), rewards
    assert all(step["ledger_residual"] == 0 for step in steps)
    assert all(step["rows/error"] == step["rows/timed_out"] == 0 for step in steps)
    assert any((run / "images").iterdir())
    with closing(sqlite3.connect(run / JOURNAL_FILE)) as db:
        assert db.execute("SELECT count(*) FROM consumption").fetchone() == (176,)


# --- turns on one device ----------------------------------------------------------------------------------


def test_vllm_and_the_learner_take_turns_and_a_killed_servers_device_is_not_free_before_its_core_is_gone(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """On a GPU the core has the memory, not the server. It stands still here, to outlive the server for sure."""
    run = tmp_path / "run"
    config = make_config(
        learner={"optim": {"lr": 3e-3, "weight_decay": 0.0}},
        data={"val_files": []},
        rollout={"engine": "vllm", "sleep_level": 2},
        trainer={"mode": "sync", "max_steps": 9, "samples_per_step": 1},
    )
    fork_cores(config)
    with Pair(config, run, server_of_this=True) as pair:
        metrics = run / "metrics.jsonl"
        pair.wait_for(lambda: metrics.exists() and len(lines(metrics)) >= 2, timeout_s=240)
        pair.wait_for(lambda: pair.has_it(pair.server))
        pair.learner.send_signal(signal.SIGSTOP)
        check_turns(run)
        (core,) = [int(line.split()[2]) for line in (run / USERS_FILE).read_text().splitlines()]
        assert core in {process.pid for process in psutil.Process(pair.server.pid).children(recursive=True)}
        os.kill(core, signal.SIGSTOP)
        pair.server.kill()
        pair.server.wait()
        waiting, until = DeviceLease(run, "waiting"), time.monotonic() + 0.5
        while time.monotonic() < until:
            assert not waiting.try_take()
        os.kill(core, signal.SIGCONT)  # it finds its server gone, and ends
        pair.wait_for(waiting.try_take, timeout_s=15)
        assert process_birth(core) is None


def check_turns(run: Path) -> None:
    """The device has changed hands, and the steps so far are on policy."""
    taken = lines(run / TRACE_FILE)[::2]
    assert all(one["holder"] != other["holder"] for one, other in pairwise(taken)), "one after the other"
    assert sum(turn["holder"] == "rollout_server" for turn in taken) >= 3
    steps = lines(run / "metrics.jsonl")
    assert len(steps) >= 2
    assert all(step["wake_s/rollout"] > 0 and step["sleep_s/rollout"] > 0 for step in steps)
    assert {step["sleep_bytes/rollout"] for step in steps} == {0}, "vLLM's CPU build only changes its state"
    assert {step["staleness/max"] for step in steps} == {0}
    assert all(step["logprob_diff_max"] < 1e-4 for step in steps)
