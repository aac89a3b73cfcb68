"""Supervised warm start on two ranks under ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.plugins.sft.test_sft_on_ranks import check_two_ranks
from tests.rigs.zero import HAS_ZERO, zero

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")]
MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_learn_what_one_process_does(make_config: MakeConfig, tmp_path: Path, stage: int) -> None:
    check_two_ranks(make_config, tmp_path, zero(stage), {})
