"""A rank that has no memory for a micro-batch: all begin the step again with a smaller budget, or say why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from learner.training.token_budget import BUDGET_FILE
from tests.rigs.small_runs import assert_every_prompt_trained_once, failure_of, logs, small
from tests.rigs.two_processes import start, start_command, with_ports, write_config
from tests.rigs.waiting import wait_until
from tests.system.test_torchrun import end, start_ranks, steps_of

pytestmark = pytest.mark.slow
STEPS = 6
SMALL_MEMORY = """
import os
from pathlib import Path
import torch
from asyncrl.algorithms.losses import PolicyLoss

def loss(tokens, config):
    n = len(tokens.logprobs)
    if os.environ.get("RANK", "0") == "RANK_OF_IT" and Path("MARK_PATH").exists() and n > ROOM:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {n} trained tokens")
    return PolicyLoss(-tokens.advantages * tokens.logprobs, {})
"""
"""A policy loss that finds memory for so many trained tokens on one rank, once a file is there."""


def config_of(
    make_config: Callable[..., RunConfig], folder: Path, learner: Mapping[str, Any], *, rank: int, room: int
) -> RunConfig:
    loss = SMALL_MEMORY.replace("MARK_PATH", str(folder / "mark")).replace("RANK_OF_IT", str(rank))
    (folder / "loss.py").write_text(loss.replace("ROOM", str(room)))
    return small(
        make_config,
        algorithm={"policy_loss": f"{folder / 'loss.py'}:loss"},
        learner={"max_staleness": 1, **learner},
        trainer={"max_steps": STEPS, "save_freq": 2},
        network={"timeout_s": 10.0, "reconnect_timeout_s": 120.0},
    )


def check(run: Path, log: str) -> None:
    """Each sample was trained once, and the budget shrank until a pass had memory."""
    assert_every_prompt_trained_once(run, STEPS)
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    kept = json.loads((run / BUDGET_FILE).read_text())["tokens"]
    assert lines[-1]["memory/tokens_per_microbatch"] == kept < 100
    assert f"The step begins again from checkpoint and journal, with a budget of {kept}" in log
    assert f"micro-batches have up to {kept} tokens, not 8192" in log


def test_a_run_goes_on_with_a_budget_for_which_there_is_memory(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    check_smaller_budget(make_config, tmp_path, {"engine": "fsdp2"}, rank=1)


def check_smaller_budget(
    make_config: Callable[..., RunConfig], tmp_path: Path, engine: dict[str, Any], *, rank: int
) -> None:
    """Train on two ranks, of which one runs out of memory."""
    config = config_of(make_config, tmp_path, {**engine, "num_processes": 2}, rank=rank, room=20)
    run, log = Path(config.run_dir), tmp_path / "train.log"
    train = start_command("train", str(write_config(config, tmp_path / "given")), log=log)
    try:
        wait_until(lambda: steps_of(run) >= 3, "three steps of two ranks", timeout_s=120)
        (tmp_path / "mark").touch()
        assert train.wait(timeout=300) == 0, f"{log.read_text()}\n{logs(run / 'logs')}"
    finally:
        train.kill()
    said = (run / "logs" / "learner.log").read_text()
    check(run, said)
    assert said.count("error: ") >= 2, "each rank says why it ends"
    assert "started again: learner" in log.read_text()


def test_torchruns_ranks_go_on_as_well(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = with_ports(config_of(make_config, tmp_path, {"engine": "fsdp2"}, rank=1, room=20))
    run, log, file = Path(config.run_dir), tmp_path / "torchrun.log", write_config(config, tmp_path)
    server = start("rollout_server", file)
    learner = start_ranks(file, log, restarts=4)
    try:
        wait_until(lambda: steps_of(run) >= 3, "three steps of two ranks", tmp_path, timeout_s=180)
        (tmp_path / "mark").touch()
        assert learner.wait(timeout=300) == 0, log.read_text()[-6000:]
        assert server.wait(timeout=60) == 0
    finally:
        end(learner, server)
    check(run, log.read_text())


def test_a_row_for_which_a_rank_has_no_memory_ends_the_run_with_its_numbers(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = config_of(make_config, tmp_path, {"engine": "fsdp2", "num_processes": 2}, rank=1, room=0)
    run, log = Path(config.run_dir), tmp_path / "train.log"
    (tmp_path / "mark").touch()
    train = start_command("train", str(write_config(config, tmp_path / "given")), log=log)
    try:
        assert train.wait(timeout=300) == 3, f"{log.read_text()}\n{logs(run / 'logs')}"
    finally:
        train.kill()
    failure = failure_of(run)
    assert (failure.service, failure.kind) == ("learner", "bad_state")
    assert "rank 1: step 1 (policy version 0), update 1 of 1: no memory for micro-batches" in failure.reason
    assert "each is a single row, the longest of" in failure.reason
