"""Losses of routers on two ranks: the steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.tiny_families import make_expert_or_recurrent
from tests.system.test_ranks import RANKS, TOLERANCE, steps_alone_and_on_two_ranks


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_router_losses_on_two_ranks_are_those_of_one(
    make_config: Callable[..., RunConfig], tmp_path: Path, engine: str
) -> None:
    """One micro-batch for each rank beside one of all: the shares of tokens per expert are then the whole update's."""
    folder = make_expert_or_recurrent("qwen3_vl_moe", tmp_path / "model")
    config = make_config(
        model={"path": str(folder), "dtype": "float32", "freeze_vision_tower": False},
        algorithm={"router_losses": {"balance_coef": 0.1, "z_coef": 0.1}},
        batch={"prompts_per_step": 4, "group_size": 4, "tokens_per_microbatch": 8192},
        learner={**RANKS, "engine": engine},
    )
    tolerance = TOLERANCE["float32"]
    for mine, theirs in steps_alone_and_on_two_ranks(config, tmp_path):
        # Metrics of a micro-batch are weighed by its trained tokens, and not by all of its tokens.
        reported = {name for name in mine if name.startswith("router/")}
        assert {n: theirs[n] for n in reported} == pytest.approx({n: mine[n] for n in reported}, rel=5e-3)
        exact = [{n: v for n, v in each.items() if n not in reported} for each in (theirs, mine)]
        assert exact[0] == pytest.approx(exact[1], rel=tolerance, abs=tolerance, nan_ok=True)
