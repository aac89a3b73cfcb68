"""Sync mode with the real processes: one device in turns, and nothing else is different."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.small_runs import logs
from tests.test_resume import assert_same_run, resume_config
from tests.two_processes import run_both

pytestmark = pytest.mark.slow


def in_turns(config: RunConfig, run: Path, **rollout: object) -> RunConfig:
    return config.model_copy(
        update={
            "run_dir": str(run),
            "trainer": config.trainer.model_copy(update={"mode": "sync"}),
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )


@pytest.mark.parametrize("level", [1, 2])
def test_a_sync_run_is_the_on_policy_run_on_two_devices_bit_for_bit(
    make_config: Callable[..., RunConfig], tmp_path: Path, level: int
) -> None:
    whole = tmp_path / "async"
    assert run_both(resume_config(make_config, whole), whole) == (0, 0)
    run = tmp_path / "sync"
    config = in_turns(resume_config(make_config, run), run, sleep_level=level)
    assert run_both(config, run) == (0, 0), logs(run)
    assert_same_run(run, whole, config)
