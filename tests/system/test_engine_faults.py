"""Faults of engines and servers in real runs: each is found by the step that docs/lab-log/engine-faults.md states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.fault_table import ADAPTER, PIXELS, PREFIX, TEMPLATE, WEIGHTS, faults_from_the_start, faults_of_updates
from tests.rigs.small_runs import failure_of

MakeConfig = Callable[..., RunConfig]


@pytest.mark.slow
def test_other_prompts_and_a_blind_engine_get_no_work(make_config: MakeConfig, tmp_path: Path) -> None:
    template, pixels, blind = faults_from_the_start(make_config, tmp_path / "run")
    assert {template.fault, pixels.fault} == {TEMPLATE, PIXELS}
    assert template.version is pixels.version is None
    assert "model.max_pixels=3136" in pixels.reason
    assert blind.version == 0
    assert "its log-probs are those of grey images" in blind.reason
    assert (blind.run, blind.steps) == (3, 0)
    assert blind.reason in failure_of(tmp_path / "run").reason


@pytest.mark.slow
def test_what_is_stale_after_the_first_update_is_sent_away_and_the_run_goes_on(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Off policy, where no token is of the learner's own version."""
    learner = {"max_staleness": 2, "optim": {"lr": 1e-5, "weight_decay": 0.0}}
    weights, prefix = faults_of_updates(make_config, tmp_path / "run", [WEIGHTS, PREFIX], learner=learner)
    for found in (weights, prefix):
        assert found.version in (1, 2), "a fast learner has made step 2 before the check began"
        assert "a prefix or encoder cache that is not cleared" in found.reason
        assert (found.run, found.steps) == (0, 4)
    assert "its log-probs are nearer to those of version 0" in weights.reason


@pytest.mark.slow
def test_an_adapter_that_is_not_applied_ends_the_run_within_the_limit_of_log_probs(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    learner = {"max_staleness": 0, "optim": {"lr": 1e-6, "weight_decay": 0.0}}
    (found,) = faults_of_updates(make_config, tmp_path / "run", [ADAPTER], rank=4, alone=True, learner=learner)
    assert (found.version, found.run, found.steps) == (1, 3, 1)
    assert "its log-probs are those of the base model without the adapter" in found.reason
