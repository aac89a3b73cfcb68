"""vLLM in the memory plan: its share of a budget, its graphs, and the room that its cache is left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.lines import CONTEXT_BYTES
from asyncrl.memory_plan.plan import make_plan
from asyncrl.memory_plan.token_choice import settle_tokens, token_steps
from asyncrl_plugins.vllm.memory import (
    GRAPHS_BYTES,
    GRAPHS_LEFT_BYTES,
    cache_bytes,
    graph_sizes,
    memory_utilization,
    step_tokens,
)
from asyncrl_plugins.vllm.start import engine_arguments
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


def shared(make_config: MakeConfig, small: Path, budget_gib: float, **rollout: Any) -> RunConfig:
    """Both processes on one GPU."""
    return planned(
        make_config,
        small,
        trainer={"mode": "sync"},
        gpu_memory={"budget_gib": budget_gib},
        learner={"device": "cuda:0"},
        rollout={"device": "cuda:0", "engine": "vllm", **rollout},
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: nothing of this has run on a GPU."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))


@pytest.mark.parametrize("engine_args", [{}, {"max_num_batched_tokens": 4096}, {"enforce_eager": True}])
def test_vllm_measures_nothing_where_the_learner_is_on_its_gpu(
    make_config: MakeConfig, small: Path, gpu: None, engine_args: dict[str, Any]
) -> None:
    """Its profiling pass ends where another process frees memory meanwhile: the plan says how large its cache is."""
    config = shared(make_config, small, 24, engine_args=engine_args)
    told = engine_arguments(config, cuda=True, text_config=None, banned=[])
    planned_lines = {line.name: line.nbytes for line in make_plan(config).phases[1].lines}
    del planned_lines["KV cache"]
    share = told["gpu_memory_utilization"] * 80 * GIB
    beside = sum(size for name, size in planned_lines.items() if "learner" not in name and "context" not in name)
    assert told["kv_cache_memory_bytes"] == pytest.approx(share - CONTEXT_BYTES - beside, abs=2)
    assert any(
        f"a step of {told['max_num_batched_tokens']} tokens" == line.why for line in make_plan(config).phases[1].lines
    ), "the plan counts with the step that vLLM is told"


def test_a_budget_without_room_for_a_sequence_is_refused_before_vllm_starts(
    make_config: MakeConfig, small: Path, gpu: None
) -> None:
    with pytest.raises(UserError, match=r"GiB are left for sequences, and one of the longest takes .* Raise it, or"):
        cache_bytes(shared(make_config, small, 2.8), 80 * GIB)


def test_without_chunks_a_step_has_room_for_a_whole_prompt(make_config: MakeConfig) -> None:
    def tokens(**rollout: Any) -> int:
        data = {"max_prompt_length": 9000, "max_response_length": 1000}
        batch = {"tokens_per_microbatch": 10_000}
        return step_tokens(make_config(data=data, batch=batch, rollout={"engine": "vllm", **rollout}))

    assert tokens() == 8192
    assert tokens(max_concurrent_sequences=10_000) == 10_000
    assert tokens(engine_args={"enable_chunked_prefill": False}) == 10_000
    assert tokens(engine_args={"enable_chunked_prefill": False, "max_num_batched_tokens": 12_000}) == 12_000


def test_graphs_are_captured_for_a_few_sizes_up_to_the_most(make_config: MakeConfig, gpu: None) -> None:
    assert graph_sizes(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert (graph_sizes(1), graph_sizes(8)) == ([1], [1, 2, 4, 8])

    def told(**engine_args: Any) -> dict[str, Any]:
        config = make_config(rollout={"engine": "vllm", "max_concurrent_sequences": 8, "engine_args": engine_args})
        return engine_arguments(config, cuda=True, text_config=None, banned=[])

    assert told()["cudagraph_capture_sizes"] == [1, 2, 4, 8]
    assert told(cudagraph_capture_sizes=[4])["cudagraph_capture_sizes"] == [4]
    for yours in ({"enforce_eager": True}, {"compilation_config": {"cudagraph_capture_sizes": [4]}}):
        assert "cudagraph_capture_sizes" not in told(**yours)


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
