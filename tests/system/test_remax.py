"""ReMax through two processes, killed and resumed: each group has a greedy completion, scored and not trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.small_runs import PER_STEP, STEPS, assert_every_prompt_trained_once, small
from tests.system.test_resume import run_killed

pytestmark = pytest.mark.slow


def test_greedy_completions_are_scored_and_not_trained(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small(make_config, algorithm={"adv_estimator": "remax"}, learner={"max_staleness": 1})
    size = config.batch.group_size
    run_killed(config.model_copy(update={"run_dir": str(run)}), run, ("step.trained:2",))
    assert_every_prompt_trained_once(run)
    metrics, samples = read_lines(run / "metrics.jsonl"), read_lines(run / "samples.jsonl")
    assert len(samples) == STEPS * PER_STEP
    for line in metrics:
        groups = [sample["completions"] for sample in samples if sample["step"] == line["step"]]
        requests = [[c.get("request") for c in group] for group in groups]
        assert requests == [[None] * size + ["greedy"]] * PER_STEP
        sampled, greedy = [c for group in groups for c in group[:size]], [group[size] for group in groups]
        assert line["tokens"] == sum(c["length"] for c in sampled)
        assert line["reward/mean"] == pytest.approx(sum(c["reward"] for c in sampled) / len(sampled))
        assert line["baseline/reward"] == pytest.approx(sum(c["reward"] for c in greedy) / len(greedy))
        assert (line["ledger_residual"], line["baseline/missing"]) == (0, 0)
        assert line["grad_norm"] > 0
