"""LUFFY through two processes, killed and resumed: each group has a demonstration, scored and trained, not sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.small_runs import PER_STEP, STEPS, assert_every_prompt_trained_once, small
from tests.system.test_resume import run_killed

pytestmark = pytest.mark.slow
ANSWER = {"function": "asyncrl.demo.reward:answer"}


def test_demonstrations_come_with_their_groups(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small(
        make_config,
        algorithm={"policy_loss": "luffy"},
        learner={"max_staleness": 1},
        reward={"functions": [ANSWER]},
        trainer={"max_steps": STEPS, "samples_per_step": PER_STEP, "save_freq": 1},
    )
    run_killed(config.model_copy(update={"run_dir": str(run)}), run, ("step.trained:2",))
    assert_every_prompt_trained_once(run)
    metrics, samples = (
        [json.loads(line) for line in (run / f"{name}.jsonl").open()] for name in ("metrics", "samples")
    )
    assert len(samples) == STEPS * PER_STEP
    for line in metrics:
        groups = [sample for sample in samples if sample["step"] == line["step"]]
        demonstrations = [group["completions"][-1] for group in groups]
        for one, group in zip(demonstrations, groups, strict=True):
            assert re.fullmatch(rf"read \d \d answer {group['answer']}", one["text"])
            assert one["request"] == f"begins with {one['length']} tokens that were put there"
        assert [one["reward"] for one in demonstrations] == [1.0] * PER_STEP, "the same reward function scores them"
        assert line["inserted/groups"] == PER_STEP
        assert line["inserted/tokens"] == sum(one["length"] for one in demonstrations)
        assert line["tokens"] == sum(c["length"] for group in groups for c in group["completions"][:-1])
        assert line["reward/mean"] < 0.5, "of what the policy sampled, which is not right yet"
        assert line["ledger_residual"] == 0
        assert line["supervised_weight"] > 0
        assert line["grad_norm"] > 0
