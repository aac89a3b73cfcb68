"""PAPO's second pass on two ranks: the steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.system.test_ranks import RANKS, TOLERANCE, steps_alone_and_on_two_ranks


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
    tolerance = TOLERANCE["float32"]
    for mine, theirs in steps_alone_and_on_two_ranks(config, tmp_path):
        assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)
