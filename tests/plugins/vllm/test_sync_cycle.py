"""Both halves of a sync run on one device, in turns: memory, time, and what they compute after they have slept."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.plan import check_plan
from benchmarks.gpu_cycle import FULL, TINY, WHOLE, Cycle, cycle_config, link_bytes_per_second, run_cycle
from benchmarks.gpu_report import report, settings

BUDGET_GIB = 24.0
WORKSPACES = 128 * 2**20
"""Of cuBLAS, which torch counts to its tensors and the plan to the context: 98 MiB on an H100."""
POOL = 32 * 2**20
"""Pieces in which torch's pool gives memory back: less of a small model may stay."""
MakeModel = Callable[[str, str, str], Path]

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
HALVES = [  # adapters; None: all weights, with their masters and moments in host memory
    pytest.param("cpu", "tiny", "hf", False, id="cpu"),
    pytest.param("cpu", "tiny", "hf", True, id="cpu-adapters"),
    pytest.param("cpu", "tiny", "hf", None, id="cpu-whole"),
    pytest.param("cuda", "tiny", "hf", False, id="cuda-tiny", marks=pytest.mark.gpu),
    pytest.param("cuda", "4b", "hf", True, id="cuda-4b", marks=[pytest.mark.gpu, pytest.mark.slow]),
    pytest.param("cuda", "4b", "hf", None, id="cuda-4b-whole", marks=[pytest.mark.gpu, pytest.mark.slow]),
    pytest.param("cuda", "4b", "vllm", True, id="cuda-4b-vllm", marks=[pytest.mark.gpu, pytest.mark.slow, needs_vllm]),
]


@pytest.fixture
def budget(emptied_device: None) -> Iterator[None]:
    """On a larger device torch is held to the budget, too."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, BUDGET_GIB * GIB / total))
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def run(device: str, size: str, engine: str, adapters: bool | None, random_model: MakeModel, folder: Path) -> Cycle:
    shape: dict[str, Any] = (FULL if adapters else WHOLE) if size == "4b" else TINY
    dtype = "bfloat16" if device == "cuda" else "float32"
    model = random_model(size, dtype, device)
    sections = settings(size, device, engine, BUDGET_GIB, adapters=adapters, offload=adapters is None)
    config = cycle_config(model, folder, shape, **sections)
    plan = check_plan(config)
    assert plan is not None, "there is a budget, and this fits it"
    return asyncio.run(run_cycle(config, shape))


@pytest.mark.parametrize(("device", "size", "engine", "adapters"), HALVES)
def test_a_cycle_keeps_to_the_plan_and_to_the_numbers(
    budget: None, random_model: MakeModel, tmp_path: Path, device: str, size: str, engine: str, adapters: bool | None
) -> None:
    cycle = run(device, size, engine, adapters, random_model, tmp_path)
    off, onto = link_bytes_per_second(torch.device(device), GIB if device == "cuda" else 1 << 24)
    print(report(cycle, off, onto))
    assert cycle.published == cycle.plan.model.published
    first, second = cycle.differences
    limits = (0.2, 0.03) if device == "cuda" else (1e-3, 1e-4)
    for difference in (first, second):
        assert difference.max() <= limits[0]
        assert difference.mean() <= limits[1]
    if device == "cuda":
        check_memory(cycle, engine)


def check_memory(cycle: Cycle, engine: str) -> None:
    """Planned tensors are an upper bound within a factor, and who sleeps has left."""
    planned = [step for step in cycle.steps if step.planned]
    for step in planned:
        if engine == "vllm" and step.name.startswith("engine"):
            continue  # its tensors are in other processes; the device's use is in the report
        assert step.peak <= 1.05 * step.planned + WORKSPACES, (
            f"{step.name}: {step.peak / GIB:.2f} GiB, more than was planned"
        )
    assert max(step.left for step in cycle.steps) <= BUDGET_GIB * GIB
    awake = cycle.step("learner trains").left
    asleep = cycle.step("learner sleeps").left
    model = cycle.plan.model
    offloads = cycle.plan.config.learner.offloads_masters
    assert awake - asleep + POOL >= 0.9 * (model.weights if offloads else model.kept)
