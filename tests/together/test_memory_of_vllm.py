"""vLLM in the memory plan beside other plug-ins: device channels, 8-bit weights, the tables of doctor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.parts import NCCL_BYTES
from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB, lines
from asyncrl.memory_plan.plan import make_plan
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.memory_plan.token_choice import settle_layers
from asyncrl.models.loading import load_model
from asyncrl_plugins.doctor.advice import advice
from asyncrl_plugins.doctor.host_memory import host_items
from asyncrl_plugins.quantization.grid import quantizable
from asyncrl_plugins.vllm.memory import GRAPHS_BYTES, memory_utilization
from benchmarks import random_models
from benchmarks.random_models import make_model
from tests.unit.asyncrl.test_memory_plan import MakeConfig, items, planned, small
from tests.unit.asyncrl.test_memory_plan_ranks import FEW, HEAVY, config_of

__all__ = ["small"]

LEARNER_DEVICE = {"nccl": "cuda:2", "cuda_ipc": "cuda:0"}


def over_devices(make_config: MakeConfig, folder: Path, channel: str, where: str, **sections: Any) -> RunConfig:
    """A configuration with the devices of channel `where`."""
    rollout = {"device": "cuda:0", "weights_channel": channel, **sections.pop("rollout", {})}
    return planned(make_config, folder, learner={"device": LEARNER_DEVICE[where]}, rollout=rollout, **sections)


@pytest.mark.parametrize(
    ("channel", "engine", "servers"),
    [
        ("nccl", {"engine": "vllm", "tensor_parallel_size": 2}, 1),
        ("cuda_ipc", {"engine": "vllm"}, 2),
    ],
    ids=str,
)
def test_versions_in_device_memory_are_planned(
    make_config: MakeConfig, small: Path, channel: str, engine: dict[str, Any], servers: int
) -> None:
    rollout = {**engine, "servers": servers}
    plan, other, auto = (
        make_plan(over_devices(make_config, small, each, channel, rollout=rollout)) for each in (channel, "shm", "auto")
    )
    assert auto.phases == other.phases
    found = {line.name: line.nbytes for phase in plan.phases for line in phase.lines}
    version = plan.model.published
    wanted = {"weights that are sent": 2 * version, "weights that arrive": servers * version}
    if channel == "nccl":
        wanted |= {"nccl of the learner": servers * NCCL_BYTES, "nccl of the rollout server": servers * NCCL_BYTES}
    assert {name: found[name] for name in wanted} == wanted
    more = [mine.nbytes - its.nbytes for mine, its in zip(plan.phases, other.phases, strict=True)]
    assert len(more) == (2 if channel == "nccl" else 1)
    assert sum(more) == sum(wanted.values())
    assert all(part > 0 for part in more)
    assert f"rollout.weights_channel={channel}" in items(plan)
    assert "weights that" not in items(other)


def test_vllm_gets_what_the_budget_leaves_beside_versions_that_arrive(make_config: MakeConfig, small: Path) -> None:
    sections = {"rollout": {"engine": "vllm", "servers": 2}, "gpu_memory": {"budget_gib": 24}}
    shm, nccl = (
        memory_utilization(over_devices(make_config, small, channel, "nccl", **sections), 80 * GIB)
        for channel in ("shm", "nccl")
    )
    beside = rehearse(planned(make_config, small)).published + NCCL_BYTES
    assert (shm, nccl) == (0.15, pytest.approx((12 - beside / GIB) / 80, abs=1e-3))
    rollout, budget = {"engine": "vllm"}, {"budget_gib": 0.25}
    config = over_devices(make_config, small, "nccl", "nccl", rollout=rollout, gpu_memory=budget)
    with pytest.raises(UserError, match=r"new weights take 0.5: nothing is left .* or rollout.weights_channel=shm$"):
        memory_utilization(config, 80 * GIB)


def test_cuda_graphs_of_a_sleeping_vllm_are_on_the_host(make_config: MakeConfig, small: Path) -> None:
    def graphs(**engine_args: Any) -> int:
        rollout = {"device": "auto", "engine": "vllm", "engine_args": engine_args}
        config = planned(make_config, small, trainer={"mode": "sync"}, learner={"device": "auto"}, rollout=rollout)
        host = {item.name: item.nbytes for item in host_items(make_plan(config))}
        return host.get("engine's CUDA graphs asleep", 0)

    assert graphs() == GRAPHS_BYTES
    assert graphs(sleep_mode_offload_cudagraph=False) == graphs(enforce_eager=True) == 0


def test_weights_of_8_bits_are_planned_where_the_engine_holds_them(make_config: MakeConfig, small: Path) -> None:
    def weights(engine: str, quantization: str) -> int:
        rollout = {"engine": engine, "quantization": quantization, "device": "cuda:1"}
        config = planned(make_config, small, model={"dtype": "bfloat16"}, rollout=rollout)
        phase = make_plan(config).phases[-1]
        (line,) = [line for line in phase.lines if line.name == "weights"]
        assert ("linear layers in" in line.why) == (engine == "vllm" and bool(quantization))
        return line.nbytes

    model = load_model(planned(make_config, small, model={"dtype": "bfloat16"}).model, device=torch.device("cpu"))
    matrices = [model.get_parameter(name) for name in quantizable(model)]
    saved = sum(matrix.numel() - 4 * matrix.shape[0] for matrix in matrices)
    assert saved > 0
    assert weights("vllm", "") - weights("vllm", "fp8") == saved
    assert weights("hf", "") == weights("hf", "fp8")


def test_ranks_that_take_turns_are_proposed_with_a_server_that_divides_the_models_heads(
    one_thread: None, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "NCCL_BYTES", 0)
    monkeypatch.setitem(random_models.SIZES, "heavy", HEAVY)
    heavy = make_model(tmp_path / "heavy", "heavy")
    whole = changed(
        config_of(make_config, heavy, FEW, {"learner": {"engine": "torch", "num_processes": 1}}),
        {"trainer.mode": "sync", "rollout.engine": "vllm", "learner.device": "cuda", "rollout.device": "cuda"},
    )
    ranks = {"learner.engine": "fsdp2", "learner.num_processes": 4, "rollout.tensor_parallel_size": 2}
    needed = make_plan(changed(whole, ranks)).peak
    monkeypatch.setattr("asyncrl_plugins.doctor.advice.attention_heads", lambda _: 6)
    said = "\n".join(advice(make_plan(changed(whole, {"gpu_memory.budget_gib": (needed + 1) / GIB}))))
    assert re.search(r"learner\.engine=fsdp2 learner\.num_processes=[24] rollout\.tensor_parallel_size=2 ", said)
    together = said.partition("Together ")[2]
    assert "lora" not in together, "what trains fewer weights comes last"


def test_vllm_leaves_no_room_in_which_layers_keep_their_activations(
    one_thread: None, make_config: MakeConfig, small: Path
) -> None:
    """It fills what the budget has, with its cache."""
    config = planned(make_config, small, learner={"gradient_checkpointing": True})
    beside = {"gpu_memory.budget_gib": 40, "learner.device": "cuda", "rollout.device": "cuda", "rollout.engine": "vllm"}
    whole = changed(config, beside)
    assert settle_layers(whole, 1) == (whole, "")
