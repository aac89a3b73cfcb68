"""The memory plan of ranks under ZeRO, against what PyTorch's profiler counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl_plugins.deepspeed import memory
from benchmarks import random_models
from tests.rigs.full_micro_batch import Shape
from tests.rigs.rank_memory import ZERO_BUCKET
from tests.rigs.zero import HAS_ZERO, zero
from tests.unit.asyncrl.test_memory_plan import SHAPE
from tests.unit.asyncrl.test_memory_plan_ranks import (
    ABOVE,
    BF16,
    CHECKPOINTED,
    FEW,
    HEAVY,
    MakeConfig,
    lines,
    plans_and_measured,
)
from tests.unit.asyncrl.test_token_choice import check_largest_number

pytestmark = pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")
ZERO_CASES: dict[str, tuple[str, Shape, dict[str, Any]]] = {
    **{f"heavy, fp32, stage {stage}": ("heavy", FEW, {"learner": zero(stage)}) for stage in (1, 2, 3)},
    **{f"heavy, bf16, stage {stage}": ("heavy", FEW, {"model": BF16, "learner": zero(stage)}) for stage in (1, 2, 3)},
    "bf16, critic and reference, stage 2": (
        "tiny",
        SHAPE,
        {"model": BF16, "algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1}, "learner": zero(2)},
    ),
    "bf16, adapter, checkpointing, stage 3": (
        "tiny",
        SHAPE,
        {"model": {**BF16, "lora": {"rank": 4}}, "learner": {**CHECKPOINTED, **zero(3)}},
    ),
}
LARGEST = 4 * 8000 * 256
"""Bytes of the largest gradient of `heavy`."""
ZERO_PADDING = 1024
"""Bytes by which parts of ZeRO are rounded up in other places than in the plan."""


@pytest.mark.usefixtures("one_thread")
def test_the_largest_number_of_tokens_that_fits_is_chosen(make_config: MakeConfig) -> None:
    check_largest_number(make_config, {**zero(2), "num_processes": 2})


def test_two_ranks_under_zero_take_what_was_planned(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(random_models.SIZES, "heavy", HEAVY)
    monkeypatch.setattr(memory, "ZERO_BUCKET", ZERO_BUCKET)
    found = plans_and_measured(make_config, tmp_path, ZERO_CASES)
    for name, (plan, measured) in found.items():
        of_rank = lines(plan)
        kept = {"weights", "gradients", "critic", "critic's optimiser state", "reference policy"}
        kept -= {"weights"} if "parts of the weights" in of_rank else set()  # the engine's
        lasting = sum(nbytes for line, nbytes in of_rank.items() if line in kept or line.startswith("parts of"))
        more = lasting - sum(measured[part] for part in ("weights", "gradients", "masters", "moments"))
        assert 0 <= more <= (LARGEST if name == "heavy, fp32, stage 2" else ZERO_PADDING), name
        beside = of_rank.get("gathered weights", 0) + of_rank.get("gradients on their way", 0)
        passing = beside + plan.model.passing
        assert measured["passing"] <= passing <= ABOVE * measured["passing"], name
        assert measured["stepping"] <= beside + of_rank["working memory"], name
