"""Two processes that train by rollouts with weights of 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.alignment_rig import limit_of
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.together.shown_conversations import check_quantization

pytestmark = pytest.mark.slow


def test_a_run_learns_from_fp8_rollouts_and_says_what_they_are(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = make_config(
        learner={"max_staleness": 1, "optim": {"lr": 3e-3, "weight_decay": 0.0}},
        batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
        rollout={"quantization": "fp8"},
        data={"val_files": []},
        trainer={"max_steps": 24, "samples_per_step": 1},
    )
    assert run_both(config, run) == (0, 0), logs(run)
    steps = read_lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards
    first = steps[0]
    assert first["staleness/max"] == 0
    assert 1e-6 < first["mismatch_kl_k3"] < 0.05
    assert 1e-3 < first["staleness_0/logprob_diff_max"] < limit_of(config)
    log = (run / "learner.log").read_text()
    assert "hf engine, fp8 weights" in log
    assert "it samples with fp8 weights" in log
    (server,) = json.loads((run / "status.json").read_text())["servers"] or [{"quantization": "fp8"}]
    assert server["quantization"] == "fp8"
    check_quantization(run, "fp8")
