"""Whole runs of two ranks under ZeRO: training, and a rank that runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.zero import HAS_ZERO, zero
from tests.system.test_end_to_end import check_asynchronous_training
from tests.system.test_memory_on_ranks import check_smaller_budget

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")]
MakeConfig = Callable[..., RunConfig]


def test_asynchronous_training_raises_the_reward_and_exports_a_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    check_asynchronous_training(make_config, tmp_path, {**zero(2), "num_processes": 2})


@pytest.mark.parametrize(("stage", "rank"), [(3, 0), (2, 1)])
def test_a_run_goes_on_with_a_budget_for_which_there_is_memory(
    make_config: MakeConfig, tmp_path: Path, stage: int, rank: int
) -> None:
    check_smaller_budget(make_config, tmp_path, zero(stage), rank=rank)
