"""Runs that were killed and resumed: their steps are made again by `asyncrl replay`, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.replay import replay
from learner.training.roles import WEIGHTS_FILE
from learner.training.sharded_files import read_whole_state
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_resume import assert_same_run, run_killed

pytestmark = pytest.mark.slow


def test_a_killed_run_with_a_critic_ends_with_the_same_bits_of_both(
    make_config: Callable[..., RunConfig], tmp_path: Path, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of a reference that follows the policy, with coefficients that move. The learner dies in the fifth step, two
    after its checkpoint; `asyncrl replay` makes that step again, too."""
    config = make_config(
        algorithm={
            "adv_estimator": "gae",
            "kl_reward_coef": 0.1,
            "kl_control": {"kind": "adaptive", "target": 0.001, "horizon": 32},
            "entropy_control": {"target": 10.0},
        },
        critic={"optim": {"lr": 1e-3}},
        reference={"ema": 0.9},
        trainer={"max_steps": 6, "samples_per_step": 4, "save_freq": 3},
        network={"timeout_s": 5.0},
    )
    whole, run = tmp_path / "whole", tmp_path / "killed"
    assert run_both(config.model_copy(update={"run_dir": str(whole)}), whole) == (0, 0), logs(whole)
    run_killed(config.model_copy(update={"run_dir": str(run)}), run, ["step.trained:5"])
    assert_same_run(run, whole, config)
    for role in ("critic", "reference"):
        mine, theirs = (read_whole_state(p / "checkpoints" / "step-000006" / role / WEIGHTS_FILE) for p in (run, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    lines = read_lines(run / "metrics.jsonl")
    for name in ("kl_coef", "entropy_coeff", "critic/value"):
        assert len({line[name] for line in lines}) > 3, f"{name} should move"
    assert replay.main([str(run), "--step", "5"]) == 0, capsys.readouterr().out
