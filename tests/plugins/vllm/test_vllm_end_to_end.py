"""The digits task with the real vLLM, by the command that a user types: two processes, live weight updates, images; and
the same two taking turns on one device."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil

from asyncrl.config.schema import RunConfig
from protocol.device_lock import TRACE_FILE, USERS_FILE, DeviceLease, process_birth
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM, fork_cores
from tests.rigs.engine_run import check_digits_run
from tests.system.test_end_to_end import lines
from tests.system.test_sync import Pair

pytestmark = NEEDS_VLLM


def test_the_digits_task_trains_through_vllm_and_its_reward_rises(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Processes: learner, server, vLLM's core, rewards."""
    check_digits_run(make_config, tmp_path, "vllm", processes=4, timeout_s=240)


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
        pair.wait_for((run / USERS_FILE).exists)
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
