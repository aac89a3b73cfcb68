"""vLLM in the memory plan: its share of a budget, its graphs, and the room that its cache is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.lines import CONTEXT_BYTES
from asyncrl.memory_plan.plan import make_plan
from asyncrl.memory_plan.token_choice import settle_tokens, token_steps
from asyncrl_plugins.vllm.memory import GRAPHS_BYTES, GRAPHS_LEFT_BYTES, memory_utilization
from tests.unit.asyncrl.test_memory_plan import MakeConfig, planned, small
from tests.unit.asyncrl.test_token_choice import AUTO, needed

__all__ = ["small"]


def test_vllm_gets_what_the_budget_leaves(make_config: MakeConfig, small: Path) -> None:
    """Beside the learner's context in turns."""
    turns = planned(
        make_config,
        small,
        trainer={"mode": "sync"},
        gpu_memory={"budget_gib": 24},
        learner={"device": "cuda:0"},
        rollout={"device": "cuda:0", "engine": "vllm"},
    )
    assert memory_utilization(turns, 80 * GIB) == pytest.approx((24 - CONTEXT_BYTES / GIB) / 80, abs=1e-3)
    assert memory_utilization(turns, 24 * GIB) < 1 - CONTEXT_BYTES / GIB / 24 + 1e-9


def test_cuda_graphs_of_a_sleeping_vllm_are_planned(make_config: MakeConfig, small: Path) -> None:
    """They stay on the device unless vLLM takes them to the host, which keeps only what CUDA itself has of them."""

    def learner_awake(**engine_args: Any) -> int:
        """Bytes on the device beside the learner's."""
        rollout = {"device": "auto", "engine": "vllm", "engine_args": engine_args}
        device = {"learner": {"device": "auto"}, "rollout": rollout}
        plan = make_plan(planned(make_config, small, trainer={"mode": "sync"}, **device))
        phase = plan.phases[0]
        graphs = sum(line.nbytes for line in phase.lines if "graphs" in line.name)
        awake = sum(line.nbytes for line in plan.phases[1].lines if "graphs" in line.name)
        assert awake == (0 if engine_args.get("enforce_eager") else GRAPHS_BYTES)
        return graphs

    assert learner_awake() == GRAPHS_LEFT_BYTES
    assert learner_awake(sleep_mode_offload_cudagraph=False) == GRAPHS_BYTES
    assert learner_awake(enforce_eager=True) == 0


def test_half_of_what_is_left_stays_for_the_cache_of_vllm(make_config: MakeConfig) -> None:
    config = make_config(**{**AUTO, "rollout": {"device": "cpu", "engine": "vllm"}})
    steps = token_steps(config)
    least, most = needed(config, steps[0]), needed(config, steps[-1])
    settled, _ = settle_tokens(config, most)
    assert needed(config, settled.batch.microbatch_tokens) - least <= (most - least) / 2
