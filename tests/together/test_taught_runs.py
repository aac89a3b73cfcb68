"""Runs with teachers: killed and resumed, in sync mode, off policy under adapters, and on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.replay import replay
from tests.plugins.distillation.test_teachers import HINT, folders
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_ranks import RANKS, steps_alone_and_on_two_ranks
from tests.system.test_resume import assert_same_run, run_killed

__all__ = ["folders"]
pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]
DISTANCE = "teacher/divergence"
TOLERANCE = 2e-5
"""Of metrics, relative above 1: ranks add up in another order."""


def taught(make_config: MakeConfig, folders: dict[str, str], **sections: Any) -> RunConfig:
    """A run of gkd with two teachers, both of which see a hint."""
    named = {"teachers": {"sum": folders["read"], "default": folders["rest"]}, "teacher_key": "kind"}
    return make_config(
        algorithm={"adv_estimator": "gkd", "gkd": {"reward_weight": 0.1}, "distillation": named | HINT},
        reference={"path": folders["rest"]},
        **sections,
    )


def test_killed_or_in_sync_mode_a_run_with_teachers_is_the_same_run(
    make_config: MakeConfig,
    tmp_path: Path,
    folders: dict[str, str],
    one_thread: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The learner dies in the fifth step, two after its checkpoint; `asyncrl replay` makes that step again, too."""
    trainer = {"max_steps": 6, "samples_per_step": 4, "save_freq": 3}
    network = {"timeout_s": 5.0}
    config = taught(make_config, folders, trainer=trainer, network=network)
    whole, killed, sync = (tmp_path / name for name in ("whole", "killed", "sync"))
    assert run_both(config.model_copy(update={"run_dir": str(whole)}), whole) == (0, 0), logs(whole)
    run_killed(config.model_copy(update={"run_dir": str(killed)}), killed, ["step.trained:5"])
    assert_same_run(killed, whole, config)
    lines, resumed = (read_lines(run / "metrics.jsonl") for run in (whole, killed))
    assert [line[DISTANCE] for line in resumed] == [line[DISTANCE] for line in lines]
    assert all(line[DISTANCE] > 0 and line["grad_norm"] > 0 for line in lines)
    assert "teaches" in (whole / "learner.log").read_text()
    assert replay.main([str(killed), "--step", "5"]) == 0, capsys.readouterr().out
    in_turns = taught(make_config, folders, trainer=trainer | {"mode": "sync"}, network=network)
    assert run_both(in_turns.model_copy(update={"run_dir": str(sync)}), sync) == (0, 0), logs(sync)
    assert_same_run(sync, whole, config)


@pytest.mark.parametrize("estimator", ["opd", "gkd"])
def test_a_stale_student_with_adapters_learns_from_itself_with_a_hint(
    make_config: MakeConfig, tmp_path: Path, one_thread: None, estimator: str
) -> None:
    config = make_config(
        model={"lora": {"rank": 4}},
        algorithm={"adv_estimator": estimator, "distillation": HINT},
        learner={"max_staleness": 2},
        trainer={"max_steps": 6, "samples_per_step": 4},
    )
    run = tmp_path / "run"
    assert run_both(config.model_copy(update={"run_dir": str(run)}), run) == (0, 0), logs(run)
    lines = read_lines(run / "metrics.jsonl")
    distance = DISTANCE if estimator == "gkd" else "reference_kl"
    assert max(line["staleness/max"] for line in lines) > 0
    assert all(math.isfinite(line[distance]) and line["grad_norm"] > 0 for line in lines)


def test_steps_with_teachers_on_two_ranks_are_the_steps_of_one(
    make_config: MakeConfig, tmp_path: Path, folders: dict[str, str], one_thread: None
) -> None:
    config = taught(make_config, folders, learner=RANKS)
    for mine, theirs in steps_alone_and_on_two_ranks(config, tmp_path):
        assert {"teacher/divergence", "teacher/mass_of_others", "teacher/share/sum"} <= mine.keys()
        assert theirs == pytest.approx(mine, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)
