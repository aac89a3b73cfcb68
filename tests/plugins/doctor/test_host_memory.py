"""Host memory of a run, against real models on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig, changed
from asyncrl.config.sections import ModelConfig
from asyncrl.memory_plan.plan import MemoryPlan, make_plan
from asyncrl.models.loading import load_model, skeleton
from asyncrl.plugins import installed
from asyncrl_plugins.doctor.host_memory import PIXELS, can_stay_mapped, host_items, prompt_pixels
from benchmarks.random_models import make_model
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.full_micro_batch import image_prompt
from tests.rigs.zero import HAS_ZERO, zero
from tests.unit.asyncrl.test_memory_plan import PROMPT, planned
from tests.unit.asyncrl.test_memory_plan_ranks import RANKS, lines

HAS_RELAYS = "relay" in installed("weight_channels")
MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny")


def host(plan: MemoryPlan) -> dict[str, int]:
    return {item.name: item.nbytes for item in host_items(plan)}


def test_offloaded_state_and_a_learner_asleep_are_on_the_host(make_config: MakeConfig, small: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16"}, "algorithm": {"adv_estimator": "gae"}}
    config = planned(make_config, small, **sections, trainer={"mode": "sync"}, learner={"cpu_offload": True})
    plan = make_plan(config)
    assert plan.model.critic
    assert host(plan)["optimiser state, offloaded"] == plan.model.offloaded + plan.model.critic.offloaded
    assert host(plan)["learner asleep"] == plan.model.weights + plan.model.critic.weights


def test_an_offloaded_reference_is_on_the_host(make_config: MakeConfig, small: Path) -> None:
    config = planned(make_config, small, algorithm={"kl_loss_coef": 0.1}, model={"dtype": "bfloat16"}, learner={})
    config = changed(config, {"learner.device": "cuda"})
    there, offloaded = make_plan(config), make_plan(changed(config, {"reference.offload": True}))
    assert sum(host(offloaded).values()) - sum(host(there).values()) == there.model.reference


@pytest.mark.parametrize(("dtype", "stays"), [("float32", True), ("bfloat16", False)])
def test_parameters_stay_in_a_file_of_their_dtype(tiny_model: Path, dtype: str, stays: bool) -> None:
    """As tests/unit/asyncrl/test_weight_addresses.py finds them."""
    config = ModelConfig(path=str(tiny_model), dtype=dtype)
    assert can_stay_mapped(config, skeleton(config)) == stays


@pytest.mark.parametrize(("rank", "level"), [(0, 1), (0, 2), (4, 2)])
def test_what_a_sleeping_engine_keeps_is_planned(make_config: MakeConfig, small: Path, rank: int, level: int) -> None:
    """With adapters the base weights are not published: they must be kept."""
    config = planned(
        make_config, small, trainer={"mode": "sync"}, model={"lora": {"rank": rank}}, rollout={"sleep_level": level}
    )
    (line,) = [line for line in host_items(make_plan(config)) if line.name == "engine asleep"]

    async def keep() -> int:
        bans_nothing: Any = SimpleNamespace(placeholder_ids=())
        engine = HFEngine(config, bans_nothing)
        await engine.start()
        await engine.sleep()
        kept = sum(item.what.nbytes for item in engine._sleeper._sleeping if item.offset >= 0)
        await engine.close()
        return kept

    assert asyncio.run(keep()) == line.nbytes
    assert ("not published" in line.why) == (level == 2 and rank > 0)


def test_pixels_of_tickets_are_counted(make_config: MakeConfig, small: Path) -> None:
    """Beside training, servers hold held-out rows besides their training tickets."""
    base = {"data": {"max_prompt_length": PROMPT, "val_files": ["held_out.parquet"]}, "evaluation": {"every_steps": 5}}
    on_policy, beside = (
        make_plan(planned(make_config, small, **base, learner={"device": "cpu", "max_staleness": bound}))
        for bound in (0, 1)
    )
    prompts, one = on_policy.config.batch.prompts_per_step, prompt_pixels(on_policy.config)
    full = image_prompt(load_model(on_policy.config.model, device=torch.device("cpu")), PROMPT)
    assert full.pixel_values is not None
    assert one == full.pixel_values.nbytes * PROMPT // (PROMPT - 5), "all but five tokens of that one are an image"
    assert [host(plan)[PIXELS] for plan in (on_policy, beside)] == [prompts * one, 2 * 2 * prompts * one]


@pytest.mark.parametrize(("channel", "versions"), [("zmq", 1), *([("relay", 2)] if HAS_RELAYS else [])])
def test_versions_that_servers_keep_are_counted(
    make_config: MakeConfig, small: Path, channel: str, versions: int
) -> None:
    rollout = {"weights_channel": channel, "servers": 3}
    plan = make_plan(planned(make_config, small, learner={"device": "cpu"}, rollout=rollout))
    assert host(plan)["weights over ZeroMQ"] == 3 * versions * plan.model.published
    mapped = make_plan(planned(make_config, small, learner={"device": "cpu"}))
    assert "weights over ZeroMQ" not in {line.name for line in host_items(mapped)}


@pytest.mark.parametrize(
    ("engine", "kinds"),
    [({}, 3), *([(zero(2), 3), (zero(3), 4)] if HAS_ZERO else [])],
    ids=["fsdp2", "ZeRO-2", "ZeRO-3"][: 3 if HAS_ZERO else 1],
)
def test_parts_in_host_memory_are_those_of_all_ranks(
    make_config: MakeConfig, tmp_path: Path, engine: dict[str, Any], kinds: int
) -> None:
    small = make_model(tmp_path / "tiny", "tiny")
    on_gpus = planned(make_config, small, learner={**RANKS, **engine})
    on_gpus = changed(on_gpus, {"learner.device": "cuda", "rollout.device": "cuda:2"})
    model = make_plan(on_gpus).model
    there, offloaded = make_plan(on_gpus, model), make_plan(changed(on_gpus, {"learner.cpu_offload": True}), model)
    parts = {name: nbytes for name, nbytes in lines(there).items() if name.startswith("parts of")}
    assert len(parts) == kinds
    assert not parts.keys() & lines(offloaded).keys()
    (kept,) = (line.nbytes for line in host_items(offloaded) if line.name == "parts, offloaded")
    assert kept == 2 * sum(parts.values())
    assert offloaded.phases[0].nbytes < there.phases[0].nbytes
