"""PAPO's second pass on two ranks: the steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from learner.ranks.group import ALONE
from tests.rigs.one_process import in_one_process
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.system.test_ranks import RANKS, STEPS, TOLERANCE, check_weights


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_steps_with_masked_images_on_two_ranks_are_the_steps_of_one(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    check_two_ranks(make_config, tmp_path, "fsdp2")


def check_two_ranks(make_config: Callable[..., RunConfig], tmp_path: Path, engine: str) -> None:
    config = make_config(
        algorithm={"papo": {"kl_coef": 0.01}, "kl_loss_coef": 0.1},
        reference={"ema": 0.9},
        learner={**RANKS, "engine": engine},
    )
    found = run_ranks(tmp_path / "two", {"papo": config}, steps=STEPS)["papo"]["metrics"]
    alone = in_one_process(config)
    expected = take_steps(alone, tmp_path / "alone", ALONE, STEPS)["metrics"]
    tolerance = TOLERANCE["float32"]
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)
    check_weights(alone, tmp_path / "alone", tmp_path / "two" / "papo")
